// Products of many sizes: each number must be the sum by fused multiply-adds in the order of the inputs, however many rows
// there are and however they lie; those of `dots` must be the ones that a row has by itself. Prints what is not so.

#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "vectors.h"

using namespace tinsmith;
using Floats = std::vector<float>;

std::mt19937 generator(1);

Floats random(int64_t size) {
  std::normal_distribution<float> normal;
  Floats values(size);
  for (float& value : values) value = normal(generator);
  return values;
}

Floats turned(const Floats& from, int64_t rows, int64_t width) {
  Floats to(from.size());
  transpose(from.data(), width, rows, width, to.data(), rows);
  return to;
}

bool differ(const Floats& a, const Floats& b) { return std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) != 0; }

// The upper halves of numbers whose lower halves become zero.
std::vector<Narrow> narrowed(Floats& values) {
  std::vector<Narrow> upper;
  for (float& value : values) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    upper.push_back(bits >> 16);
    bits &= 0xffff0000;
    std::memcpy(&value, &bits, sizeof(bits));
  }
  return upper;
}

int wrong(int64_t rows, int64_t inputs, int64_t width) {
  const Floats x = random(rows * inputs);
  Floats w = random(inputs * width);
  const std::vector<Narrow> narrow = narrowed(w);
  const Floats x_turned = turned(x, rows, inputs), w_turned = turned(w, inputs, width);
  Floats expected(rows * width), found(rows * width), alone(rows * width);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t j = 0; j < width; ++j) {
      float sum = 0;
      for (int64_t i = 0; i < inputs; ++i) sum = std::fma(x[r * inputs + i], w[i * width + j], sum);
      expected[r * width + j] = sum;
    }
  }
  product({x.data(), inputs}, rows, w.data(), width, inputs, found.data(), width, width);
  int count = differ(found, expected);
  product({x_turned.data(), 1, rows}, rows, w.data(), width, inputs, found.data(), width, width);
  count += differ(found, expected);
  if (width % kLanes == 0) {
    product({x.data(), inputs}, rows, narrow.data(), width, inputs, found.data(), width, width);
    count += differ(found, expected);
  }
  dots(x.data(), inputs, rows, w_turned.data(), inputs, inputs, found.data(), width, width);
  for (int64_t r = 0; r < rows; ++r) {
    dots(x.data() + r * inputs, inputs, 1, w_turned.data(), inputs, inputs, alone.data() + r * width, width, width);
  }
  return count + differ(found, alone);
}

int main() {
  int total = 0;
  for (const int64_t rows : {1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 16, 17, 31, 64}) {
    for (const int64_t inputs : {3, 8, 16, 48, 64, 100}) {
      for (const int64_t width : {1, 2, 3, 4, 5, 8, 12, 16, 24, 31, 32, 48, 64, 70, 100, 128, 200}) {
        const int count = wrong(rows, inputs, width);
        if (count > 0) std::printf("%d rows, %d inputs, %d columns: %d\n", int(rows), int(inputs), int(width), count);
        total += count;
      }
    }
  }
  return total > 0;
}

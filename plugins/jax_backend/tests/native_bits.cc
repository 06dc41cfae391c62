// Products of many sizes: each number must be the sum by multiply-adds in the
// order of the inputs, however many rows there are and however they lie, and the
// same if a matrix is of bfloat16 and widened.
// Those of pairs of bfloat16, whose rounding is the processor's, and those of
// `dots` must be the ones that a row has by itself, and near the sums. Prints
// what is not so.

#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "frozen.h"
#include "products.h"
#include "vectors.h"

using namespace tinsmith;
using Numbers = std::vector<float>;

std::mt19937 generator(1);

// As the kernels add: rounded once where the processor can, as they are compiled for it.
float multiplied_and_added(float x, float w, float sum) {
#if defined(__FMA__) || defined(__aarch64__)
  return std::fma(x, w, sum);
#else
  return x * w + sum;
#endif
}

Numbers random(int64_t size) {
  std::normal_distribution<float> normal;
  Numbers values(size);
  for (float& value : values) value = normal(generator);
  return values;
}

Numbers turned(const Numbers& from, int64_t rows, int64_t width) {
  Numbers to(from.size());
  transpose(from.data(), width, rows, width, to.data(), rows);
  return to;
}

bool differ(const Numbers& a, const Numbers& b) {
  return std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) != 0;
}

// The upper halves of numbers whose lower halves become zero.
std::vector<Narrow> narrowed(Numbers& values) {
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

int wrong_pairs(const Numbers& x, int64_t rows, int64_t inputs, const std::vector<Narrow>& w, int64_t width) {
  const int64_t half = inputs / 2;
  const auto widened = [](Narrow number) {
    const uint32_t bits = number << 16;
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return static_cast<double>(value);
  };
  std::vector<Pair> packed(rows * half), columns(half * width);
  pack(x.data(), x.size(), packed.data());
  for (int64_t i = 0; i < half; ++i) {
    for (int64_t j = 0; j < width; ++j) {
      columns[i * width + j] = w[2 * i * width + j] | static_cast<Pair>(w[(2 * i + 1) * width + j]) << 16;
    }
  }
  const auto* rounded_x = reinterpret_cast<const Narrow*>(packed.data());
  Numbers found(rows * width), again(rows * width), alone(rows * width);
  product({packed.data(), half}, rows, columns.data(), width, half, found.data(), width, width);
  int count = 0;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t j = 0; j < width; ++j) {
      double sum = 0, size = 0;
      for (int64_t i = 0; i < inputs; ++i) {
        const double each = widened(rounded_x[r * inputs + i]) * widened(w[i * width + j]);
        sum += each, size += std::abs(each);
      }
      count += std::abs(found[r * width + j] - sum) > 1e-6 * size;
    }
    product({packed.data() + r * half, half}, 1, columns.data(), width, half, alone.data() + r * width, width, width);
  }
  count += differ(found, alone);
  if (width % (2 * kLanes) == 0) {
    product({packed.data(), half}, rows, w.data(), width, half, again.data(), width, width);
    count += differ(found, again);
  }
  again = random(rows * width);
  for (size_t at = 0; at < found.size(); ++at) alone[at] = again[at] + found[at];
  product({packed.data(), half}, rows, columns.data(), width, half, again.data(), width, width, true);
  count += differ(again, alone);
  if (rows % kLanes == 0) {  // pairs of numbers below each other, and what they are of beside each other
    const Numbers x_turned = turned(x, rows, inputs);
    std::vector<Pair> below(half * rows);
    pack_rows(x_turned.data(), inputs, rows, below.data());
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t i = 0; i < half; ++i) count += below[i * rows + r] != packed[r * half + i];
    }
  }
  std::vector<Pair> turned(half * width);  // [width, half]
  for (int64_t i = 0; i < half; ++i) {
    for (int64_t j = 0; j < width; ++j) turned[j * half + i] = columns[i * width + j];
  }
  dots(packed.data(), half, rows, turned.data(), half, half, again.data(), width, width);
  for (int64_t r = 0; r < rows; ++r) {
    dots(packed.data() + r * half, half, 1, turned.data(), half, half, alone.data() + r * width, width, width);
  }
  count += differ(again, alone);
  for (size_t at = 0; at < found.size(); ++at) count += std::abs(found[at] - again[at]) > 1e-3f;
  return count;
}

int wrong(int64_t rows, int64_t inputs, int64_t width) {
  const Numbers x = random(rows * inputs);
  Numbers w = random(inputs * width);
  const std::vector<Narrow> narrow = narrowed(w);
  const Numbers x_turned = turned(x, rows, inputs), w_turned = turned(w, inputs, width);
  Numbers expected(rows * width), found(rows * width), alone(rows * width);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t j = 0; j < width; ++j) {
      float sum = 0;
      for (int64_t i = 0; i < inputs; ++i) {
        sum = multiplied_and_added(x[r * inputs + i], w[i * width + j], sum);
      }
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
  count += differ(found, alone);
  Numbers same = w_turned, coarse = x;
  const std::vector<Narrow> narrow_turned = narrowed(same), narrow_x = narrowed(coarse);
  dots(x.data(), inputs, rows, narrow_turned.data(), inputs, inputs, alone.data(), width, width);
  count += differ(found, alone);
  product_of_lanes({coarse.data(), nullptr}, rows, inputs, w.data(), width, nullptr, found.data(), width, width);
  product_of_lanes({nullptr, narrow_x.data()}, rows, inputs, w.data(), width, nullptr, alone.data(), width, width);
  count += differ(found, alone);
  return inputs % 32 == 0 && width % kLanes == 0 ? count + wrong_pairs(x, rows, inputs, narrow, width) : count;
}

// Whether `pack` rounds to the nearest number, of two the even one, keeps
// infinities and what is no number.
bool rounds_wrongly() {
  const uint32_t given[] = {0x3f800000, 0x3f807fff, 0x3f808000, 0x3f808001, 0x3f818000, 0xbf818000, 0x7f7fffff,
                            0x7f800000, 0xff800000, 0x7fc00001, 0x7f800001, 0xffffffff, 0,          0x80000000};
  const Narrow expected[] = {0x3f80, 0x3f80, 0x3f80, 0x3f81, 0x3f82, 0xbf82, 0x7f80,
                             0x7f80, 0xff80, 0x7fc0, 0x7fc0, 0x7fc0, 0,      0x8000};
  Narrow found[14];
  pack(reinterpret_cast<const float*>(given), 14, reinterpret_cast<Pair*>(found));
  return std::memcmp(found, expected, sizeof(found)) != 0;
}

int main() {
  int total = rounds_wrongly();
  if (total > 0) std::printf("bfloat16 is rounded wrongly\n");
  for (const int64_t rows : {1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 16, 17, 31, 64}) {
    for (const int64_t inputs : {3, 8, 16, 48, 64, 96, 100}) {
      for (const int64_t width : {1, 2, 3, 4, 5, 8, 12, 16, 24, 31, 32, 48, 64, 70, 96, 100, 128, 200, 224}) {
        const int count = wrong(rows, inputs, width);
        if (count > 0) std::printf("%d rows, %d inputs, %d columns: %d\n", int(rows), int(inputs), int(width), count);
        total += count;
      }
    }
  }
  return total > 0;
}

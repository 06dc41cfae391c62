// The frozen matrices of a model, and products by them.
//
// Those of bfloat16 multiply inputs that are rounded to bfloat16, if the call says so; every sum is float32, and so is all
// that lies between two products. Else they are widened where they multiply, to the numbers that they would be as
// float32.

#ifndef TINSMITH_FROZEN_H_
#define TINSMITH_FROZEN_H_

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "call.h"
#include "products.h"
#include "room.h"
#include "vectors.h"

namespace tinsmith {

constexpr int64_t kTile = 64;  // tokens of a tile, which are of one sequence and one adapter

// A matrix [inputs, outputs] of one layer, or a part of it: one of both is null.
struct Frozen {
  const float* wide = nullptr;
  const Narrow* narrow = nullptr;

  Frozen from(int64_t offset) const {
    return {wide == nullptr ? nullptr : wide + offset, narrow == nullptr ? nullptr : narrow + offset};
  }
};

// The matrices of all layers.
struct FrozenLayers {
  Frozen all;
  int64_t stride = 0;
  Frozen of(int64_t layer) const { return all.from(layer * stride); }
};

inline Frozen frozen(const Array& array) {
  if (array.type == Type::kBFloat16) return {nullptr, static_cast<const Narrow*>(array.data)};
  if (array.type != Type::kFloat32) throw Refused{"a matrix that is neither of float32 nor of bfloat16"};
  return {static_cast<const float*>(array.data), nullptr};
}
inline FrozenLayers frozen_layers(const Array& array) { return {frozen(array), array.count() / array.dims[0]}; }

// Rounds numbers that follow each other to pairs; an even number of them.
inline void pack(const float* from, int64_t count, Pair* to) {
  Narrow* halves = reinterpret_cast<Narrow*>(to);
  typedef Narrow Halves __attribute__((vector_size(kLanes * sizeof(Narrow))));
  for (int64_t i = 0; i < count; i += kLanes) {
    const Halves found = __builtin_convertvector(rounded(load(from + i, count - i)), Halves);
    std::memcpy(halves + i, &found, std::min<int64_t>(kLanes, count - i) * sizeof(Narrow));
  }
}

// Rounds [rows, width] to pairs of numbers below each other, [rows / 2, width].
inline void pack_rows(const float* from, int64_t rows, int64_t width, Pair* to) {
  for (int64_t r = 0; r < rows; r += 2, from += 2 * width, to += width) {
    for (int64_t i = 0; i < width; i += kLanes) {
      const PairVec pairs = rounded(load(from + i)) | rounded(load(from + width + i)) << 16;
      std::memcpy(to + i, &pairs, sizeof(pairs));
    }
  }
}

// Rows of inputs [rows, size] that follow each other, with what products by bfloat16 want of them.
struct Inputs {
  const float* floats;
  const Pair* pairs;  // [rows, size / 2], or null if nothing is rounded
  int64_t size;
};

// y [rows, width] (+)= x w for columns of w, whose rows are `w_row` apart.
inline void product(const Inputs& x, int64_t rows, Frozen w, int64_t w_row, float* y, int64_t y_row, int64_t width,
                    bool adds = false) {
  if (x.pairs != nullptr) {
    product({x.pairs, x.size / 2}, rows, w.narrow, w_row, x.size / 2, y, y_row, width, adds);
  } else if (w.narrow != nullptr) {
    product({x.floats, x.size}, rows, w.narrow, w_row, x.size, y, y_row, width, adds);
  } else {
    product({x.floats, x.size}, rows, w.wide, w_row, x.size, y, y_row, width, adds);
  }
}

constexpr int64_t kWidened = 24;  // rows of w at a time, which stay near for all lanes

// y [inputs, lanes] = w x, for x [outputs, kTile] with a token in each lane. `packed` is room for half of x, or null if
// nothing is rounded.
inline void product_of_lanes(Frozen w, int64_t inputs, int64_t outputs, const float* x, int64_t x_row, Pair* packed,
                             float* y, int64_t y_row, int64_t lanes) {
  if (packed != nullptr) {
    pack_rows(x, outputs, x_row, packed);
    const Strided<Pair> pairs{reinterpret_cast<const Pair*>(w.narrow), outputs / 2};
    product(pairs, inputs, static_cast<const Pair*>(packed), x_row, outputs / 2, y, y_row, lanes);
  } else if (w.narrow != nullptr) {
    float* wide = scratch(6, kWidened * outputs);
    for (int64_t first = 0; first < inputs; first += kWidened) {
      const int64_t rows = std::min(kWidened, inputs - first);
      widen(w.narrow + first * outputs, rows * outputs, wide);
      product({wide, outputs}, rows, x, x_row, outputs, y + first * y_row, y_row, lanes);
    }
  } else {
    product({w.wide, outputs}, inputs, x, x_row, outputs, y, y_row, lanes);
  }
}

}  // namespace tinsmith

#endif  // TINSMITH_FROZEN_H_

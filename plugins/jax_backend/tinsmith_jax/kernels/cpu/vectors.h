// Products and functions of float32 vectors, with the same bits for a row however many rows there are.

#ifndef TINSMITH_VECTORS_H_
#define TINSMITH_VECTORS_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

namespace tinsmith {

constexpr int kLanes = 16;
typedef float Vec __attribute__((vector_size(kLanes * sizeof(float))));
typedef int32_t IntVec __attribute__((vector_size(kLanes * sizeof(int32_t))));

inline Vec load(const float* from) {
  Vec vec;
  std::memcpy(&vec, from, sizeof(vec));
  return vec;
}
inline void store(float* to, Vec vec) { std::memcpy(to, &vec, sizeof(vec)); }

// The upper half of a float32 number whose lower half is zero: bfloat16. Matrices of them have a multiple of kLanes
// columns.
typedef uint16_t Narrow;

// L numbers from memory.
template <int L>
[[gnu::always_inline]] inline auto lanes(const float* from) {
  float __attribute__((vector_size(L * sizeof(float)))) lanes;
  std::memcpy(&lanes, from, sizeof(lanes));
  return lanes;
}
template <int L>
[[gnu::always_inline]] inline auto lanes(const Narrow* from) {
  typedef uint32_t Words __attribute__((vector_size(L * sizeof(uint32_t))));
  Narrow __attribute__((vector_size(L * sizeof(Narrow)))) halves;
  std::memcpy(&halves, from, sizeof(halves));
  const Words words = __builtin_convertvector(halves, Words) << 16;
  float __attribute__((vector_size(L * sizeof(float)))) lanes;
  std::memcpy(&lanes, &words, sizeof(lanes));
  return lanes;
}
// The first `count` lanes; zeros in the others.
inline Vec load(const float* from, int64_t count) {
  if (count >= kLanes) return load(from);
  Vec vec{};
  std::memcpy(&vec, from, count * sizeof(float));
  return vec;
}
inline void store(float* to, Vec vec, int64_t count) {
  if (count >= kLanes) return store(to, vec);
  std::memcpy(to, &vec, count * sizeof(float));
}
inline Vec of(float value) { return Vec{} + value; }

// Adds neighbouring lanes: those of `a` come first, then those of `b`.
[[gnu::always_inline]] inline Vec neighbours(Vec a, Vec b) {
  return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
         __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}

// The sums of the lanes of N vectors, for N = 16.
template <int N>
[[gnu::always_inline]] inline Vec sums(const Vec (&vecs)[N]) {
  if constexpr (N == 1) {
    return vecs[0];
  } else {
    Vec half[N / 2];
#pragma GCC unroll 16
    for (int i = 0; i < N / 2; ++i) half[i] = neighbours(vecs[2 * i], vecs[2 * i + 1]);
    return sums(half);
  }
}

// The sum of the lanes, rounded as by `sums`.
inline float sum(Vec vec) {
  float lanes[kLanes];
  store(lanes, vec);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int lane = 0; lane < width; ++lane) lanes[lane] = lanes[2 * lane] + lanes[2 * lane + 1];
  }
  return lanes[0];
}

// e^x with a relative error below 2e-7; 0 below -87, where float32 has no normal numbers.
inline Vec exp(Vec x) {
  const Vec clamped = x > of(-87.0f) ? (x < of(88.0f) ? x : of(88.0f)) : of(-87.0f);
  const Vec shift = of(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vec whole = (clamped * 1.44269504f + shift) - shift;
  const Vec rest = (clamped - whole * 0.693359375f) + whole * 2.12194440e-4f;
  Vec series = of(1.9875691e-4f);  // the polynomial of Cephes
  series = series * rest + 1.3981999507e-3f;
  series = series * rest + 8.3334519073e-3f;
  series = series * rest + 4.1665795894e-2f;
  series = series * rest + 1.6666665459e-1f;
  series = series * rest + 5.0000001201e-1f;
  const Vec fraction = series * (rest * rest) + rest + 1.0f;
  const IntVec power = (__builtin_convertvector(whole, IntVec) + 127) << 23;
  Vec scale;
  std::memcpy(&scale, &power, sizeof(scale));
  const Vec result = fraction * scale;
  return x != x ? x : (x < of(-87.0f) ? Vec{} : result);
}

// Numbers [row, column] that are `row` apart from row to row, and `column` from column to column.
struct Strided {
  const float* at;
  int64_t row, column = 1;
  Strided from(int64_t r) const { return {at + r * row, row, column}; }
};

// R rows by V vectors of L lanes of `product`.
template <int R, int V, int L, typename W>
[[gnu::always_inline]] inline void block(Strided x, const W* w, int64_t w_row, int64_t inputs, float* y, int64_t y_row,
                                         bool adds, int64_t ahead) {
  typedef float Lanes __attribute__((vector_size(L * sizeof(float))));
  Lanes sums[R][V];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) sums[r][v] = Lanes{};
  }
  for (int64_t i = 0; i < inputs; ++i) {
    const W* from = w + i * w_row;
    Lanes weights[V];
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) {
      __builtin_prefetch(from + ahead + v * L);
      weights[v] = lanes<L>(from + v * L);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Lanes input = Lanes{} + x.at[r * x.row + i * x.column];
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) sums[r][v] += input * weights[v];
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) {
      float* to = y + r * y_row + v * L;
      if (adds) {
        Lanes before;
        std::memcpy(&before, to, sizeof(Lanes));
        sums[r][v] = before + sums[r][v];
      }
      std::memcpy(to, &sums[r][v], sizeof(Lanes));
    }
  }
}

// R rows of `product`: by V vectors as long as these fit, the rest by fewer and shorter ones.
template <int R, int V, int L = kLanes, typename W>
inline void columns(Strided x, const W* w, int64_t w_row, int64_t inputs, float* y, int64_t y_row, int64_t width,
                    bool adds, int64_t ahead) {
  int64_t j = 0;
  for (; j + V * L <= width; j += V * L) block<R, V, L>(x, w + j, w_row, inputs, y + j, y_row, adds, ahead);
  if (j == width) return;
  if constexpr (V > 1) {
    columns<R, V / 2, L>(x, w + j, w_row, inputs, y + j, y_row, width - j, adds, ahead);
  } else if constexpr (L > 1 && std::is_same_v<W, float>) {
    columns<R, 1, L / 2>(x, w + j, w_row, inputs, y + j, y_row, width - j, adds, ahead);
  }
}

// `rows` of at most R, which are known when the program runs.
template <int R, int V, typename W>
inline void few_rows(int64_t rows, Strided x, const W* w, int64_t w_row, int64_t inputs, float* y, int64_t y_row,
                     int64_t width, bool adds, int64_t ahead) {
  if (rows == R) return columns<R, V>(x, w, w_row, inputs, y, y_row, width, adds, ahead);
  if constexpr (R > 1) few_rows<R - 1, R == 3 ? 8 : V>(rows, x, w, w_row, inputs, y, y_row, width, adds, ahead);
}

// y [rows, width] (+)= x [rows, inputs] w [inputs, width]. `w_row` and `y_row` are the distances of their rows. Each
// number is one sum over the inputs in their order, to which what was there is added at the end.
//
// Six rows and four vectors use the registers best; then come five, and fewer only for what is left. A panel of w stays
// in the cache for all rows.
template <typename W>
inline void product(Strided x, int64_t rows, const W* w, int64_t w_row, int64_t inputs, float* y, int64_t y_row,
                    int64_t width, bool adds = false) {
  const int64_t fives = (6 - rows % 6) % 6, sixes = rows >= 5 * fives ? rows - 5 * fives : rows / 6 * 6;
  const int64_t panel = rows > 5 ? 4 * kLanes : width;
  for (int64_t j = 0; j < width; j += panel) {
    const int64_t wide = std::min(panel, width - j);
    int64_t r = 0;
    const auto ahead = [&] { return r == 0 ? 8 * w_row : panel; };  // what is needed soon: rows of w, the next panel
    for (; r < sixes; r += 6) {
      columns<6, 4>(x.from(r), w + j, w_row, inputs, y + r * y_row + j, y_row, wide, adds, ahead());
    }
    for (; r < rows; r += 5) {
      few_rows<5, 4>(std::min<int64_t>(5, rows - r), x.from(r), w + j, w_row, inputs, y + r * y_row + j, y_row, wide,
                     adds, ahead());
    }
  }
}

// One number of `dots`.
inline float dot(const float* x, const float* w, int64_t inputs) {
  Vec found{};
  int64_t i = 0;
  for (; i + kLanes <= inputs; i += kLanes) found += load(x + i) * load(w + i);
  if (i < inputs) found += load(x + i, inputs - i) * load(w + i, inputs - i);
  return sum(found);
}

// R by S numbers of `dots`; together 16.
template <int R, int S>
inline void dot_block(const float* x, int64_t x_row, const float* w, int64_t w_row, int64_t inputs, float* y,
                      int64_t y_row) {
  static_assert(R * S == kLanes);
  Vec found[R * S];
#pragma GCC unroll 16
  for (int each = 0; each < R * S; ++each) found[each] = Vec{};
  for (int64_t i = 0; i < inputs; i += kLanes) {
    const bool whole = i + kLanes <= inputs;
    Vec weights[S];
#pragma GCC unroll 16
    for (int s = 0; s < S; ++s) weights[s] = whole ? load(w + s * w_row + i) : load(w + s * w_row + i, inputs - i);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Vec input = whole ? load(x + r * x_row + i) : load(x + r * x_row + i, inputs - i);
#pragma GCC unroll 16
      for (int s = 0; s < S; ++s) found[r * S + s] += input * weights[s];
    }
  }
  float values[R * S];
  store(values, sums(found));
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) std::memcpy(y + r * y_row, values + r * S, S * sizeof(float));
}

// y [rows, width] = x [rows, inputs] times w [width, inputs] transposed.
inline void dots(const float* x, int64_t x_row, int64_t rows, const float* w, int64_t w_row, int64_t inputs, float* y,
                 int64_t y_row, int64_t width) {
  const int64_t fours = rows / 4 * 4;
  int64_t s = 0;
  for (; s + kLanes <= width; s += kLanes) {
    for (int64_t part = s; part < s + kLanes; part += 4) {
      for (int64_t r = 0; r < fours; r += 4) {
        dot_block<4, 4>(x + r * x_row, x_row, w + part * w_row, w_row, inputs, y + r * y_row + part, y_row);
      }
    }
    for (int64_t r = fours; r < rows; ++r) {
      dot_block<1, kLanes>(x + r * x_row, x_row, w + s * w_row, w_row, inputs, y + r * y_row + s, y_row);
    }
  }
  for (; s < width; ++s) {
    for (int64_t r = 0; r < rows; ++r) y[r * y_row + s] = dot(x + r * x_row, w + s * w_row, inputs);
  }
}

// Transposes 16 vectors: each step interleaves the first half with the second.
[[gnu::always_inline]] inline void transpose(Vec (&vecs)[kLanes]) {
#pragma GCC unroll 4
  for (int step = 0; step < 4; ++step) {
    Vec mixed[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes / 2; ++i) {
      const Vec a = vecs[i], b = vecs[i + kLanes / 2];
      mixed[2 * i] = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      mixed[2 * i + 1] = __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) vecs[i] = mixed[i];
  }
}

// to [width, rows] = from [rows, width] transposed.
inline void transpose(const float* from, int64_t from_row, int64_t rows, int64_t width, float* to, int64_t to_row) {
  for (int64_t r = 0; r < rows; r += kLanes) {
    for (int64_t j = 0; j < width; j += kLanes) {
      const int64_t high = std::min<int64_t>(kLanes, rows - r), wide = std::min<int64_t>(kLanes, width - j);
      Vec vecs[kLanes] = {};
      for (int64_t i = 0; i < high; ++i) vecs[i] = load(from + (r + i) * from_row + j, wide);
      transpose(vecs);
      for (int64_t i = 0; i < wide; ++i) store(to + (j + i) * to_row + r, vecs[i], high);
    }
  }
}

// The factor by which RMSNorm scales a row.
inline float norm_scale(const float* x, int64_t size, float eps) {
  Vec squares{};
  for (int64_t i = 0; i < size; i += kLanes) {
    const Vec part = load(x + i, size - i);
    squares += part * part;
  }
  return 1.0f / std::sqrt(sum(squares) / static_cast<float>(size) + eps);
}

// RMSNorm of one row; `to` may be `from`.
inline void normed(const float* from, const float* weight, int64_t size, float eps, float* to) {
  const float scale = norm_scale(from, size, eps);
  for (int64_t i = 0; i < size; ++i) to[i] = from[i] * scale * weight[i];
}

// Rotates one head by angles [size / 2], in halves as Hugging Face stores them.
inline void rotate(float* head, const float* cos, const float* sin, int64_t size) {
  for (int64_t i = 0; i < size / 2; ++i) {
    const float first = head[i], second = head[i + size / 2];
    head[i] = first * cos[i] - second * sin[i];
    head[i + size / 2] = second * cos[i] + first * sin[i];
  }
}

}  // namespace tinsmith

#endif  // TINSMITH_VECTORS_H_

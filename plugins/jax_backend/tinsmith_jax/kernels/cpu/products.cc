#include "products.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

namespace tinsmith {
namespace {

// Adds to each sum the products of a pair by a pair.
[[gnu::always_inline]] inline void add_products(Vec& sums, PairVec x, PairVec w) {
#if defined(__AVX512BF16__)
  asm("vdpbf16ps %2, %1, %0" : "+v"(sums) : "v"(x), "v"(w));
#else
  const auto wide = [](PairVec bits) {
    Vec floats;
    std::memcpy(&floats, &bits, sizeof(floats));
    return floats;
  };
  sums += wide(x << 16) * wide(w << 16);
  sums += wide(x & 0xffff0000u) * wide(w & 0xffff0000u);
#endif
}

// Stores the sums of one row, or adds them to what is there.
template <int V, typename Lanes>
[[gnu::always_inline]] inline void finish(const Lanes (&sums)[V], float* y, bool adds) {
#pragma GCC unroll 16
  for (int v = 0; v < V; ++v) {
    float* to = y + v * sizeof(Lanes) / sizeof(float);
    Lanes result = sums[v];
    if (adds) {
      Lanes before;
      std::memcpy(&before, to, sizeof(Lanes));
      result = before + result;
    }
    std::memcpy(to, &result, sizeof(Lanes));
  }
}

// R rows by V vectors of L lanes of `product`.
template <int R, int V, int L, typename W>
[[gnu::always_inline]] inline void block(Strided<float> x, const W* w, int64_t w_row, int64_t inputs, float* y,
                                         int64_t y_row, bool adds, int64_t ahead) {
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
  for (int r = 0; r < R; ++r) finish(sums[r], y + r * y_row, adds);
}

// V vectors of pairs, of a matrix of pairs.
template <int V>
[[gnu::always_inline]] inline void load_pairs(const Pair* w, int64_t, int64_t ahead, PairVec (&pairs)[V]) {
#pragma GCC unroll 16
  for (int v = 0; v < V; ++v) {
    __builtin_prefetch(w + ahead + v * kLanes);
    std::memcpy(&pairs[v], w + v * kLanes, sizeof(PairVec));
  }
}
template <int V>
[[gnu::always_inline]] inline void in_order(const Pair*, Vec (&)[V]) {}

// V vectors of pairs, each of numbers below each other in two rows of a matrix. One instruction interleaves eight
// columns, but in each quarter of a vector by itself, so `in_order` must put the sums right.
template <int V>
[[gnu::always_inline]] inline void load_pairs(const Narrow* w, int64_t w_row, int64_t ahead, PairVec (&pairs)[V]) {
  static_assert(V % 2 == 0);
  typedef Narrow Row __attribute__((vector_size(2 * kLanes * sizeof(Narrow))));
#pragma GCC unroll 16
  for (int v = 0; v < V; v += 2) {
    const Narrow* from = w + v * kLanes;
    Row a, b;
    __builtin_prefetch(from + ahead);
    __builtin_prefetch(from + w_row + ahead);
    std::memcpy(&a, from, sizeof(Row));
    std::memcpy(&b, from + w_row, sizeof(Row));
    const Row low = __builtin_shufflevector(a, b, 0, 32, 1, 33, 2, 34, 3, 35, 8, 40, 9, 41, 10, 42, 11, 43, 16, 48, 17,
                                            49, 18, 50, 19, 51, 24, 56, 25, 57, 26, 58, 27, 59);
    const Row high = __builtin_shufflevector(a, b, 4, 36, 5, 37, 6, 38, 7, 39, 12, 44, 13, 45, 14, 46, 15, 47, 20, 52,
                                             21, 53, 22, 54, 23, 55, 28, 60, 29, 61, 30, 62, 31, 63);
    std::memcpy(&pairs[v], &low, sizeof(Row));
    std::memcpy(&pairs[v + 1], &high, sizeof(Row));
  }
}
template <int V>
[[gnu::always_inline]] inline void in_order(const Narrow*, Vec (&sums)[V]) {
#pragma GCC unroll 16
  for (int v = 0; v < V; v += 2) {
    const Vec low = sums[v], high = sums[v + 1];
    sums[v] = __builtin_shufflevector(low, high, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    sums[v + 1] = __builtin_shufflevector(low, high, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  }
}

// R rows of pairs by V vectors of `product`.
template <int R, int V, int L, typename W>
[[gnu::always_inline]] inline void block(Strided<Pair> x, const W* w, int64_t w_row, int64_t inputs, float* y,
                                         int64_t y_row, bool adds, int64_t ahead) {
  static_assert(L == kLanes);
  constexpr int64_t kRows = std::is_same_v<W, Narrow> ? 2 : 1;
  Vec sums[R][V];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) sums[r][v] = Vec{};
  }
  for (int64_t i = 0; i < inputs; ++i) {
    PairVec weights[V];
    load_pairs(w + i * kRows * w_row, w_row, ahead, weights);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const PairVec input = PairVec{} + x.at[r * x.row + i * x.column];
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) add_products(sums[r][v], input, weights[v]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    in_order(w, sums[r]);
    finish(sums[r], y + r * y_row, adds);
  }
}

// R rows of `product`: by V vectors as long as these fit, the rest by fewer and shorter ones.
template <int R, int V, int L = kLanes, typename X, typename W>
inline void columns(Strided<X> x, const W* w, int64_t w_row, int64_t inputs, float* y, int64_t y_row, int64_t width,
                    bool adds, int64_t ahead) {
  int64_t j = 0;
  for (; j + V * L <= width; j += V * L) block<R, V, L>(x, w + j, w_row, inputs, y + j, y_row, adds, ahead);
  if (j == width) return;
  if constexpr (V > (std::is_same_v<X, Pair> && std::is_same_v<W, Narrow> ? 2 : 1)) {
    columns<R, V / 2, L>(x, w + j, w_row, inputs, y + j, y_row, width - j, adds, ahead);
  } else if constexpr (L > 1 && std::is_same_v<W, float>) {
    columns<R, 1, L / 2>(x, w + j, w_row, inputs, y + j, y_row, width - j, adds, ahead);
  }
}

// `rows` of at most R, which are known when the program runs.
template <int R, int V, typename X, typename W>
inline void few_rows(int64_t rows, Strided<X> x, const W* w, int64_t w_row, int64_t inputs, float* y, int64_t y_row,
                     int64_t width, bool adds, int64_t ahead) {
  if (rows == R) return columns<R, V>(x, w, w_row, inputs, y, y_row, width, adds, ahead);
  if constexpr (R > 1) few_rows<R - 1, R == 3 ? 8 : V>(rows, x, w, w_row, inputs, y, y_row, width, adds, ahead);
}

// Six rows and four vectors use the registers best; then come five, and fewer only for what is left. A panel of w stays
// in the cache for all rows.
template <typename X, typename W>
void product_of(Strided<X> x, int64_t rows, const W* w, int64_t w_row, int64_t inputs, float* y, int64_t y_row,
                int64_t width, bool adds) {
  const int64_t fives = (6 - rows % 6) % 6, sixes = rows >= 5 * fives ? rows - 5 * fives : rows / 6 * 6;
  const int64_t panel = rows > 5 ? 4 * kLanes : width;
  for (int64_t j = 0; j < width; j += panel) {
    const int64_t wide = std::min(panel, width - j);
    int64_t r = 0;
    // What is needed soon: rows of w, which pairs come to sooner, or the next panel.
    const auto ahead = [&] { return r == 0 ? (std::is_same_v<X, Pair> ? 32 : 8) * w_row : panel; };
    for (; r < sixes; r += 6) {
      columns<6, 4>(x.from(r), w + j, w_row, inputs, y + r * y_row + j, y_row, wide, adds, ahead());
    }
    for (; r < rows; r += 5) {
      few_rows<5, 4>(std::min<int64_t>(5, rows - r), x.from(r), w + j, w_row, inputs, y + r * y_row + j, y_row, wide,
                     adds, ahead());
    }
  }
}

// The first `count` numbers, or all pairs.
inline Vec some(const float* from, int64_t count) { return load(from, count); }
inline PairVec some(const Pair* from, int64_t) {
  PairVec pairs;
  std::memcpy(&pairs, from, sizeof(pairs));
  return pairs;
}
[[gnu::always_inline]] inline void add_products(Vec& sums, Vec x, Vec w) { sums += x * w; }

// R by S numbers of `dots`; together 16.
template <int R, int S, typename T>
void dot_block(const T* x, int64_t x_row, const T* w, int64_t w_row, int64_t inputs, float* y, int64_t y_row) {
  static_assert(R * S == kLanes);
  Vec found[R * S];
#pragma GCC unroll 16
  for (int each = 0; each < R * S; ++each) found[each] = Vec{};
  for (int64_t i = 0; i < inputs; i += kLanes) {
    decltype(some(x, 0)) weights[S];
#pragma GCC unroll 16
    for (int s = 0; s < S; ++s) weights[s] = some(w + s * w_row + i, inputs - i);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const auto input = some(x + r * x_row + i, inputs - i);
#pragma GCC unroll 16
      for (int s = 0; s < S; ++s) add_products(found[r * S + s], input, weights[s]);
    }
  }
  float values[R * S];
  store(values, sums(found));
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) std::memcpy(y + r * y_row, values + r * S, S * sizeof(float));
}

// One number of `dots`.
template <typename T>
float dot(const T* x, const T* w, int64_t inputs) {
  Vec found{};
  for (int64_t i = 0; i < inputs; i += kLanes) add_products(found, some(x + i, inputs - i), some(w + i, inputs - i));
  return sum(found);
}

template <typename T>
void dots_of(const T* x, int64_t x_row, int64_t rows, const T* w, int64_t w_row, int64_t inputs, float* y,
             int64_t y_row, int64_t width) {
  const auto each = [&](int64_t r, int64_t s) { y[r * y_row + s] = dot(x + r * x_row, w + s * w_row, inputs); };
  const int64_t twos = rows / 2 * 2, fours = rows / 4 * 4;
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
  for (; s + 8 <= width; s += 8) {
    for (int64_t r = 0; r < twos; r += 2) {
      dot_block<2, 8>(x + r * x_row, x_row, w + s * w_row, w_row, inputs, y + r * y_row + s, y_row);
    }
    for (int64_t part = s; twos < rows && part < s + 8; ++part) each(twos, part);
  }
  for (; s < width; ++s) {
    for (int64_t r = 0; r < rows; ++r) each(r, s);
  }
}

}  // namespace

void product(Strided<float> x, int64_t rows, const float* w, int64_t w_row, int64_t inputs, float* y, int64_t y_row,
             int64_t width, bool adds) {
  product_of(x, rows, w, w_row, inputs, y, y_row, width, adds);
}
void product(Strided<float> x, int64_t rows, const Narrow* w, int64_t w_row, int64_t inputs, float* y, int64_t y_row,
             int64_t width, bool adds) {
  product_of(x, rows, w, w_row, inputs, y, y_row, width, adds);
}
void product(Strided<Pair> x, int64_t rows, const Narrow* w, int64_t w_row, int64_t pairs, float* y, int64_t y_row,
             int64_t width, bool adds) {
  product_of(x, rows, w, w_row, pairs, y, y_row, width, adds);
}
void product(Strided<Pair> x, int64_t rows, const Pair* w, int64_t w_row, int64_t pairs, float* y, int64_t y_row,
             int64_t width, bool adds) {
  product_of(x, rows, w, w_row, pairs, y, y_row, width, adds);
}
void dots(const float* x, int64_t x_row, int64_t rows, const float* w, int64_t w_row, int64_t inputs, float* y,
          int64_t y_row, int64_t width) {
  dots_of(x, x_row, rows, w, w_row, inputs, y, y_row, width);
}
void dots(const Pair* x, int64_t x_row, int64_t rows, const Pair* w, int64_t w_row, int64_t pairs, float* y,
          int64_t y_row, int64_t width) {
  dots_of(x, x_row, rows, w, w_row, pairs, y, y_row, width);
}

}  // namespace tinsmith

// Whether the processor multiplies pairs of bfloat16 in one instruction.
extern "C" int tinsmith_multiplies_bfloat16() {
#if defined(__AVX512BF16__)
  return 1;
#else
  return 0;
#endif
}

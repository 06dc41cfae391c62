#include "products.h"

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

namespace tinsmith {
namespace {

// Vectors of a block: six rows of them, the vectors of w and one of x fit into the registers.
constexpr int kVectors = kRegisters / 8;
constexpr int64_t kPanel = 32;          // columns that are packed together
constexpr int64_t kFewForPacking = 16;  // rows that gain less from packing than it takes
constexpr int64_t kLine = 64 / sizeof(float);  // numbers that a prefetch brings

// Rows of a matrix, `row` apart.
template <typename W>
struct Rows {
  const W* at;
  int64_t row;
  Rows from(int64_t column) const { return {at + column, row}; }
  Rows after(int64_t rows) const { return {at + rows * row, row}; }
};

// How many rows of w one number of x multiplies.
template <typename X, typename W>
constexpr int64_t rows_of_input() {
  return std::is_same_v<X, Pair> && std::is_same_v<W, Narrow> ? 2 : 1;
}

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
template <int V, typename Any>
[[gnu::always_inline]] inline void finish(const Any (&sums)[V], float* y, bool adds) {
#pragma GCC unroll 16
  for (int v = 0; v < V; ++v) {
    float* to = y + v * sizeof(Any) / sizeof(float);
    Any result = sums[v];
    if (adds) {
      Any before;
      std::memcpy(&before, to, sizeof(Any));
      result = before + result;
    }
    std::memcpy(to, &result, sizeof(Any));
  }
}

// R rows by V vectors of L lanes of `product`.
template <int R, int V, int L, typename W>
[[gnu::always_inline]] inline void block(Strided<float> x, Rows<W> w, int64_t inputs, float* y, int64_t y_row,
                                         bool adds, Rows<W> soon) {
  Lanes<L> sums[R][V];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) sums[r][v] = Lanes<L>{};
  }
  for (int64_t i = 0; i < inputs; ++i) {
    const W* from = w.after(i).at;
    Lanes<L> weights[V];
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) {
      if (v * L % kLine == 0) __builtin_prefetch(soon.after(i).at + v * L);
      weights[v] = lanes<L>(from + v * L);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Lanes<L> input = repeated<L>(x.at[r * x.row + i * x.column]);
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) sums[r][v] += input * weights[v];
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) finish(sums[r], y + r * y_row, adds);
}

// V vectors of pairs, of a matrix of pairs.
template <int V>
[[gnu::always_inline]] inline void load_pairs(Rows<Pair> w, Rows<Pair> soon, PairVec (&pairs)[V]) {
#pragma GCC unroll 16
  for (int v = 0; v < V; ++v) {
    if (v * kLanes % kLine == 0) __builtin_prefetch(soon.at + v * kLanes);
    std::memcpy(&pairs[v], w.at + v * kLanes, sizeof(PairVec));
  }
}
template <int V>
[[gnu::always_inline]] inline void in_order(const Pair*, Vec (&)[V]) {}

// Interleaves two rows. One instruction does that for eight columns, but each 128 bits by themselves, so it takes the
// first four of every eight columns, or with `kSecond` = 4 the others.
template <int kSecond>
struct Below {
  static constexpr int of(int half) { return half / 8 * 8 + half % 8 / 2 + kSecond + half % 2 * 2 * kLanes; }
};
// Puts the columns from `kFirst` in order again, of sums of the first four of every eight and sums of the others.
template <int kFirst>
struct InOrder {
  static constexpr int of(int lane) {
    const int column = kFirst + lane;
    return column / 8 * 4 + column % 4 + column % 8 / 4 * kLanes;
  }
};

// V vectors of pairs, each of numbers below each other in two rows of a matrix; `in_order` puts their sums right.
template <int V>
[[gnu::always_inline]] inline void load_pairs(Rows<Narrow> w, Rows<Narrow> soon, PairVec (&pairs)[V]) {
  static_assert(V % 2 == 0);
  typedef Narrow Row __attribute__((vector_size(2 * kLanes * sizeof(Narrow))));
#pragma GCC unroll 16
  for (int v = 0; v < V; v += 2) {
    __builtin_prefetch(soon.at + v * kLanes);
    __builtin_prefetch(soon.after(1).at + v * kLanes);
    Row a, b;
    std::memcpy(&a, w.at + v * kLanes, sizeof(Row));
    std::memcpy(&b, w.after(1).at + v * kLanes, sizeof(Row));
    const Row low = shuffled<Below<0>>(a, b), high = shuffled<Below<4>>(a, b);
    std::memcpy(&pairs[v], &low, sizeof(Row));
    std::memcpy(&pairs[v + 1], &high, sizeof(Row));
  }
}
template <int V>
[[gnu::always_inline]] inline void in_order(const Narrow*, Vec (&sums)[V]) {
#pragma GCC unroll 16
  for (int v = 0; v < V; v += 2) {
    const Vec low = sums[v], high = sums[v + 1];
    sums[v] = shuffled<InOrder<0>>(low, high);
    sums[v + 1] = shuffled<InOrder<kLanes>>(low, high);
  }
}

// R rows of pairs by V vectors of `product`.
template <int R, int V, int L, typename W>
[[gnu::always_inline]] inline void block(Strided<Pair> x, Rows<W> w, int64_t inputs, float* y, int64_t y_row,
                                         bool adds, Rows<W> soon) {
  static_assert(L == kLanes);
  constexpr int64_t kOfInput = rows_of_input<Pair, W>();
  Vec sums[R][V];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) sums[r][v] = Vec{};
  }
  for (int64_t i = 0; i < inputs; ++i) {
    PairVec weights[V];
    load_pairs(w.after(i * kOfInput), soon.after(i * kOfInput), weights);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const PairVec input = PairVec{} + x.at[r * x.row + i * x.column];
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) add_products(sums[r][v], input, weights[v]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    in_order(w.at, sums[r]);
    finish(sums[r], y + r * y_row, adds);
  }
}

// R rows of `product`: by V vectors as long as these fit, the rest by fewer and shorter ones.
template <int R, int V, int L = kLanes, typename X, typename W>
inline void columns(Strided<X> x, Rows<W> w, int64_t inputs, float* y, int64_t y_row, int64_t width, bool adds,
                    Rows<W> soon) {
  int64_t j = 0;
  for (; j + V * L <= width; j += V * L) block<R, V, L>(x, w.from(j), inputs, y + j, y_row, adds, soon.from(j));
  if (j == width) return;
  if constexpr (V > rows_of_input<X, W>()) {
    columns<R, V / 2, L>(x, w.from(j), inputs, y + j, y_row, width - j, adds, soon.from(j));
  } else if constexpr (L > 1 && std::is_same_v<W, float>) {
    columns<R, 1, L / 2>(x, w.from(j), inputs, y + j, y_row, width - j, adds, soon.from(j));
  }
}

// `rows` of at most R, which are known when the program runs.
template <int R, int V, typename X, typename W>
inline void few_rows(int64_t rows, Strided<X> x, Rows<W> w, int64_t inputs, float* y, int64_t y_row, int64_t width,
                     bool adds, Rows<W> soon) {
  if (rows == R) return columns<R, V>(x, w, inputs, y, y_row, width, adds, soon);
  if constexpr (R > 1) few_rows<R - 1, R == 3 ? 2 * kVectors : V>(rows, x, w, inputs, y, y_row, width, adds, soon);
}

// Memory of this thread, until it asks for more of that type.
template <typename W>
W* aligned_room(int64_t size) {
  struct alignas(64) Line {
    W numbers[64 / sizeof(W)];
  };
  thread_local std::vector<Line> room;
  const size_t lines = (size * sizeof(W) + sizeof(Line) - 1) / sizeof(Line);
  if (room.size() < lines) room.resize(lines);
  return room.data()->numbers;
}

// Copies columns of w to memory of this thread, where they follow each other until it packs others.
template <typename W>
const W* packed(const W* w, int64_t w_row, int64_t rows, int64_t width) {
  W* to = aligned_room<W>(rows * width);
  for (int64_t r = 0; r < rows; ++r, w += w_row) {
    __builtin_prefetch(w + 16 * w_row);
    if (width == kPanel) {
      std::memcpy(to + r * width, w, kPanel * sizeof(W));  // of a size that the compiler knows
    } else {
      std::memcpy(to + r * width, w, width * sizeof(W));
    }
  }
  return to;
}

// Six rows of x use the registers best; then come five, and fewer only for what is left. A panel of w stays in the cache
// for all rows of x. If a block reads only one line of the cache from each row of w, and these rows are a power of two
// apart, as they often are, the lines displace each other. So such panels are packed.
template <typename X, typename W>
void product_of(Strided<X> x, int64_t rows, const W* w, int64_t w_row, int64_t inputs, float* y, int64_t y_row,
                int64_t width, bool adds) {
  const int64_t fives = (6 - rows % 6) % 6, sixes = rows >= 5 * fives ? rows - 5 * fives : rows / 6 * 6;
  const bool packs = kVectors * kLanes <= kLine && rows > kFewForPacking && w_row > kPanel;
  const int64_t panel = packs ? kPanel : rows > 5 ? kVectors * kLanes : width;
  for (int64_t j = 0; j < width; j += panel) {
    const int64_t wide = std::min(panel, width - j);
    const Rows<W> there{w + j, w_row};
    const Rows<W> here = packs ? Rows<W>{packed(w + j, w_row, rows_of_input<X, W>() * inputs, wide), wide} : there;
    int64_t r = 0;
    // What is prefetched: first the next panel, if this one is packed, or later rows, which pairs come to sooner; then
    // nothing new, or the next panel.
    const auto soon = [&] {
      if (packs) return r == 0 ? there.from(wide) : here;
      return r == 0 ? there.after(std::is_same_v<X, Pair> ? 32 : 8) : there.from(panel);
    };
    for (; r < sixes; r += 6) {
      columns<6, kVectors>(x.from(r), here, inputs, y + r * y_row + j, y_row, wide, adds, soon());
    }
    for (; r < rows; r += 5) {
      few_rows<5, kVectors>(std::min<int64_t>(5, rows - r), x.from(r), here, inputs, y + r * y_row + j, y_row, wide,
                            adds, soon());
    }
  }
}

// The first `count` numbers, or all pairs.
inline Vec some(const float* from, int64_t count) { return load(from, count); }
inline Vec some(const Narrow* from, int64_t count) {
  if (count >= kLanes) return lanes<kLanes>(from);
  float wide[kLanes] = {};
  widen(from, count, wide);
  return load(wide);
}
inline PairVec some(const Pair* from, int64_t) {
  PairVec pairs;
  std::memcpy(&pairs, from, sizeof(pairs));
  return pairs;
}
[[gnu::always_inline]] inline void add_products(Vec& sums, Vec x, Vec w) { sums += x * w; }

// R by S numbers of `dots`; together kLanes.
template <int R, int S, typename X, typename W>
void dot_block(const X* x, int64_t x_row, const W* w, int64_t w_row, int64_t inputs, float* y, int64_t y_row) {
  static_assert(R * S == kLanes);
  Vec found[R * S];
#pragma GCC unroll 16
  for (int each = 0; each < R * S; ++each) found[each] = Vec{};
  for (int64_t i = 0; i < inputs; i += kLanes) {
    decltype(some(w, 0)) weights[S];
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
template <typename X, typename W>
float dot(const X* x, const W* w, int64_t inputs) {
  Vec found{};
  for (int64_t i = 0; i < inputs; i += kLanes) add_products(found, some(x + i, inputs - i), some(w + i, inputs - i));
  return sum(found);
}

template <typename X, typename W>
void dots_of(const X* x, int64_t x_row, int64_t rows, const W* w, int64_t w_row, int64_t inputs, float* y,
             int64_t y_row, int64_t width) {
  const auto each = [&](int64_t r, int64_t s) { y[r * y_row + s] = dot(x + r * x_row, w + s * w_row, inputs); };
  constexpr int kHigh = kLanes / 4, kHalf = kLanes / 2;
  const int64_t twos = rows / 2 * 2, high = rows / kHigh * kHigh;
  int64_t s = 0;
  for (; s + kLanes <= width; s += kLanes) {
    for (int64_t part = s; part < s + kLanes; part += 4) {
      for (int64_t r = 0; r < high; r += kHigh) {
        dot_block<kHigh, 4>(x + r * x_row, x_row, w + part * w_row, w_row, inputs, y + r * y_row + part, y_row);
      }
    }
    for (int64_t r = high; r < rows; ++r) {
      dot_block<1, kLanes>(x + r * x_row, x_row, w + s * w_row, w_row, inputs, y + r * y_row + s, y_row);
    }
  }
  for (; s + kHalf <= width; s += kHalf) {
    for (int64_t r = 0; r < twos; r += 2) {
      dot_block<2, kHalf>(x + r * x_row, x_row, w + s * w_row, w_row, inputs, y + r * y_row + s, y_row);
    }
    for (int64_t part = s; twos < rows && part < s + kHalf; ++part) each(twos, part);
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
  if (rows <= kFewForPacking) return product_of(x, rows, w, w_row, inputs, y, y_row, width, adds);
  constexpr int64_t panel = std::max<int64_t>(kPanel, kVectors * kLanes);
  float* wide = aligned_room<float>(inputs * std::min(panel, width));
  for (int64_t j = 0; j < width; j += panel) {  // many rows multiply a panel, which is widened once for all of them
    const int64_t columns = std::min(panel, width - j);
    for (int64_t i = 0; i < inputs; ++i) {
      __builtin_prefetch(w + (i + 16) * w_row + j);
      widen(w + i * w_row + j, columns, wide + i * columns);
    }
    product_of(x, rows, static_cast<const float*>(wide), columns, inputs, y + j, y_row, columns, adds);
  }
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
void dots(const float* x, int64_t x_row, int64_t rows, const Narrow* w, int64_t w_row, int64_t inputs, float* y,
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

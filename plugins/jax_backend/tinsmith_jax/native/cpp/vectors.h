// Functions of float32 vectors.

#ifndef TINSMITH_VECTORS_H_
#define TINSMITH_VECTORS_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

namespace tinsmith {

// Numbers of a vector: as many as a register holds. Compilers accept longer vectors, but keep them in memory.
#if defined(__AVX512F__)
constexpr int kLanes = 16, kRegisters = 32;
#elif defined(__AVX2__)
constexpr int kLanes = 8, kRegisters = 16;
#elif defined(__aarch64__)
constexpr int kLanes = 4, kRegisters = 32;
#else
constexpr int kLanes = 4, kRegisters = 16;
#endif
typedef float Vec __attribute__((vector_size(kLanes * sizeof(float))));
typedef int32_t IntVec __attribute__((vector_size(kLanes * sizeof(int32_t))));

inline Vec load(const float* from) {
  Vec vec;
  std::memcpy(&vec, from, sizeof(vec));
  return vec;
}
inline void store(float* to, Vec vec) { std::memcpy(to, &vec, sizeof(vec)); }

// A bfloat16 number: the upper half of a float32 number whose lower half is zero.
typedef uint16_t Narrow;

// Two bfloat16 numbers, the first in the lower half.
typedef uint32_t Pair;
typedef uint32_t PairVec __attribute__((vector_size(kLanes * sizeof(uint32_t))));

// L numbers. One is a plain number: of vectors of one, GCC 11 rounds products before it adds them.
template <int L>
struct LanesOf {
  typedef float Type __attribute__((vector_size(L * sizeof(float))));
};
template <>
struct LanesOf<1> {
  typedef float Type;
};
template <int L>
using Lanes = typename LanesOf<L>::Type;

// L numbers from memory.
template <int L>
[[gnu::always_inline]] inline Lanes<L> lanes(const float* from) {
  Lanes<L> lanes;
  std::memcpy(&lanes, from, sizeof(lanes));
  return lanes;
}
template <int L>
[[gnu::always_inline]] inline Lanes<L> lanes(const Narrow* from) {
  typedef uint32_t Words __attribute__((vector_size(L * sizeof(uint32_t))));
  Narrow __attribute__((vector_size(L * sizeof(Narrow)))) halves;
  std::memcpy(&halves, from, sizeof(halves));
  const Words words = __builtin_convertvector(halves, Words) << 16;
  Lanes<L> lanes;
  std::memcpy(&lanes, &words, sizeof(lanes));
  return lanes;
}
inline void widen(const Narrow* from, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, lanes<kLanes>(from + i));
  for (; i < count; ++i) to[i] = lanes<1>(from + i);
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

// `value` in all L lanes. (`Vec{} + value` would be computed: it is another number if `value` is -0.)
template <int L, int... I>
[[gnu::always_inline]] inline Lanes<L> repeated(float value, std::integer_sequence<int, I...>) {
  return Lanes<L>{(static_cast<void>(I), value)...};
}
template <int L>
[[gnu::always_inline]] inline Lanes<L> repeated(float value) {
  return repeated<L>(value, std::make_integer_sequence<int, L>{});
}
inline Vec of(float value) { return repeated<kLanes>(value); }

// Rounds to bfloat16, in the lower halves; to the even one of two that are equally near.
inline PairVec rounded(Vec x) {
  PairVec bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return x != x ? PairVec{} + 0x7fc0u : (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
}

// Lane i of the result is lane Place::of(i) of `a` and, after it, `b`.
template <typename Place, typename Any, int... I>
[[gnu::always_inline]] inline Any shuffled(Any a, Any b, std::integer_sequence<int, I...>) {
#if defined(__clang__) || __GNUC__ >= 12
  return __builtin_shufflevector(a, b, Place::of(I)...);
#else  // GCC 10 and 11 have another name for it
  return __builtin_shuffle(a, b, decltype(a < b){Place::of(I)...});
#endif
}
template <typename Place, typename Any>
[[gnu::always_inline]] inline Any shuffled(Any a, Any b) {
  return shuffled<Place>(a, b, std::make_integer_sequence<int, sizeof(Any) / sizeof(a[0])>{});
}

template <int kFirst>
struct EveryOther {
  static constexpr int of(int lane) { return 2 * lane + kFirst; }
};
// From `a` and `b` in turn, beginning with their lanes `kFirst`.
template <int kFirst>
struct InTurn {
  static constexpr int of(int lane) { return kFirst + lane / 2 + lane % 2 * kLanes; }
};

// Adds neighbouring lanes: those of `a` come first, then those of `b`.
[[gnu::always_inline]] inline Vec neighbours(Vec a, Vec b) {
  return shuffled<EveryOther<0>>(a, b) + shuffled<EveryOther<1>>(a, b);
}

// The sums of the lanes of N vectors; call it with N = kLanes.
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

// Transposes kLanes vectors: each step interleaves the first half with the second.
[[gnu::always_inline]] inline void transpose(Vec (&vecs)[kLanes]) {
#pragma GCC unroll 4
  for (int step = 1; step < kLanes; step *= 2) {
    Vec mixed[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes / 2; ++i) {
      const Vec a = vecs[i], b = vecs[i + kLanes / 2];
      mixed[2 * i] = shuffled<InTurn<0>>(a, b);
      mixed[2 * i + 1] = shuffled<InTurn<kLanes / 2>>(a, b);
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

// The output head in training, over rows of a packed stream: logits, logprobs of targets, and gradients.
//
// native/head.py documents the arguments; head.py computes the same for what these do not support, and explains the
// order. As in training.cc, a tile's numbers depend on itself alone, and gradients are added tile by tile in order.
//
// C = rows, n = tiles, K = targets of a row, H = hidden, V = vocabulary, k = adapters, r = rank.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "call.h"
#include "frozen.h"
#include "products.h"
#include "room.h"
#include "team.h"
#include "vectors.h"

namespace tinsmith {
namespace {

constexpr int64_t kWords = 512;      // of the vocabulary, that one step computes the logits of
constexpr int64_t kTogether = 2048;  // words whose matrix rows stay in the cache for a tile
constexpr int64_t kColumns = 64;     // of the hidden states, that one step differentiates by

struct Rows {
  const float* hidden;             // [C, H]
  Frozen head;                     // [V, H]
  const float *A, *B;              // [k, H, r], [k, r, V]
  const int32_t *adapter, *count;  // [n]
  const float* scale;              // [n]
  const int32_t* targets;          // [C, K]
  int64_t C, H, V, K, adapters, rank;
  bool rounds;

  int64_t tiles() const { return C / kTile; }
  bool used(int64_t row) const { return row % kTile < count[row / kTile]; }
  const float* A_of(int64_t tile) const { return A + adapter[tile] * H * rank; }
  const float* B_of(int64_t tile) const { return B + adapter[tile] * rank * V; }
};

// Takes what both passes are given.
Rows rows_of(const Call& call, Arrays& given) {
  const Floats hidden = given.floats();
  const Array head = given.any();
  const Floats A = given.floats(), B = given.floats();
  const Ints adapter = given.ints();
  const Floats scale = given.floats();
  const Ints count = given.ints(), targets = given.ints();
  return {hidden.data,  frozen(head),   A.data,         B.data,       adapter.data,    count.data, scale.data,
          targets.data, hidden.dims[0], hidden.dims[1], head.dims[0], targets.dims[1], A.dims[0],  A.dims[2],  call.rounds};
}

// The log of the sum of e^x over a row.
float log_sum(const float* x, int64_t size) {
  Vec high = of(-std::numeric_limits<float>::infinity());
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    const Vec part = load(x + i);
    high = part > high ? part : high;
  }
  float highest = -std::numeric_limits<float>::infinity();
  for (int lane = 0; lane < kLanes; ++lane) highest = std::max(highest, high[lane]);
  for (int64_t rest = i; rest < size; ++rest) highest = std::max(highest, x[rest]);
  Vec total{};
  for (i = 0; i + kLanes <= size; i += kLanes) total += exp(load(x + i) - highest);
  float whole = sum(total);
  for (; i < size; ++i) whole += std::exp(x[i] - highest);
  return highest + std::log(whole);
}

// Logits [C, V], z = scale x A [C, r], and the logs of their sums [C]; logprobs [C, K], 0 where there is no token.
void forward(Team& team, const Rows& s, float* logits, float* low, float* totals, float* logp) {
  Room turned(s.C * s.H);  // [n, H, kTile]
  RoomOf<Pair> packed(s.rounds ? s.C * s.H / 2 : 0);
  team.each(s.tiles(), [&](int64_t tile) {
    const int64_t at = tile * kTile, rows = s.count[tile];
    if (rows == 0) return;
    float* to = turned.data() + at * s.H;
    transpose(s.hidden + at * s.H, s.H, kTile, s.H, to, kTile);
    if (s.rounds) pack_rows(to, s.H, kTile, packed.data() + at * s.H / 2);
    if (s.adapter[tile] < 0) return;
    float* z = low + at * s.rank;
    product({s.hidden + at * s.H, s.H}, rows, s.A_of(tile), s.rank, s.H, z, s.rank, s.rank);
    for (int64_t i = 0; i < rows * s.rank; ++i) z[i] *= s.scale[tile];
  });
  const int64_t parts = (s.V + kWords - 1) / kWords;
  team.each(s.tiles() * parts, [&](int64_t step) {
    const int64_t tile = step / parts, at = tile * kTile, rows = s.count[tile];
    if (rows == 0) return;
    const int64_t first = step % parts * kWords, words = std::min(kWords, s.V - first);
    const int64_t lanes = (rows + kLanes - 1) / kLanes * kLanes;
    float* found = scratch(0, kWords * kTile);
    if (s.rounds) {
      const Strided<Pair> from{reinterpret_cast<const Pair*>(s.head.narrow + first * s.H), s.H / 2};
      product(from, words, packed.data() + at * s.H / 2, kTile, s.H / 2, found, kTile, lanes);
    } else {
      product_of_lanes(s.head.from(first * s.H), words, s.H, turned.data() + at * s.H, kTile, nullptr, found, kTile,
                       lanes);
    }
    float* to = logits + at * s.V + first;
    transpose(found, kTile, words, rows, to, s.V);
    if (s.adapter[tile] < 0) return;
    product({low + at * s.rank, s.rank}, rows, s.B_of(tile) + first, s.V, s.rank, to, s.V, words, true);
  });
  team.each(s.C, [&](int64_t row) {
    if (!s.used(row)) {
      std::fill_n(logp + row * s.K, s.K, 0.0f);
      return;
    }
    const float* of_row = logits + row * s.V;
    totals[row] = log_sum(of_row, s.V);
    for (int64_t k = 0; k < s.K; ++k) logp[row * s.K + k] = of_row[s.targets[row * s.K + k]] - totals[row];
  });
}

// One row's logits become the derivatives by them: onehot(target) d - softmax times the sum of d.
void differentiate(const Rows& s, int64_t row, float* logits, float total, const float* d_logp) {
  float whole = 0;
  for (int64_t k = 0; k < s.K; ++k) whole += d_logp[k];
  int64_t i = 0;
  for (; i + kLanes <= s.V; i += kLanes) store(logits + i, exp(load(logits + i) - total) * -whole);
  for (; i < s.V; ++i) logits[i] = std::exp(logits[i] - total) * -whole;
  for (int64_t k = 0; k < s.K; ++k) logits[s.targets[row * s.K + k]] += d_logp[k];
}

// Turns the logits into the derivatives by them, and adds the gradients of A and B to their sums.
void backward(Team& team, const Rows& s, const float* d_logp, float* logits, const float* low, const float* totals,
              float* d_hidden, float* sums_A, float* sums_B) {
  RoomOf<Pair> packed(s.rounds ? s.C * s.V / 2 : 0);
  team.each(s.C, [&](int64_t row) {
    if (!s.used(row)) {
      std::fill_n(d_hidden + row * s.H, s.H, 0.0f);
      return;
    }
    differentiate(s, row, logits + row * s.V, totals[row], d_logp + row * s.K);
    if (s.rounds) pack(logits + row * s.V, s.V, packed.data() + row * s.V / 2);
  });
  Room d_low(s.C * s.rank);
  team.each(s.tiles(), [&](int64_t tile) {
    float* d_z = d_low.data() + tile * kTile * s.rank;
    dots(logits + tile * kTile * s.V, s.V, s.count[tile], s.B_of(tile), s.V, s.V, d_z, s.rank, s.rank);
    for (int64_t i = 0; i < s.count[tile] * s.rank; ++i) d_z[i] *= s.scale[tile];
  });
  const int64_t parts = (s.H + kColumns - 1) / kColumns;
  team.each(s.tiles() * parts, [&](int64_t step) {
    const int64_t tile = step / parts, at = tile * kTile, rows = s.count[tile];
    const int64_t first = step % parts * kColumns, width = std::min(kColumns, s.H - first);
    float* to = d_hidden + at * s.H + first;
    for (int64_t word = 0; word < s.V; word += kTogether) {
      const int64_t words = std::min(kTogether, s.V - word);
      const Frozen part = s.head.from(word * s.H + first);
      const Strided<float> from{logits + at * s.V + word, s.V};
      if (s.rounds) {
        const Strided<Pair> pairs{packed.data() + (at * s.V + word) / 2, s.V / 2};
        product(pairs, rows, part.narrow, s.H, words / 2, to, s.H, width, word > 0);
      } else if (part.narrow != nullptr) {
        product(from, rows, part.narrow, s.H, words, to, s.H, width, word > 0);
      } else {
        product(from, rows, part.wide, s.H, words, to, s.H, width, word > 0);
      }
    }
    float* turned = scratch(0, s.rank * kColumns);
    transpose(s.A_of(tile) + first * s.rank, s.rank, width, s.rank, turned, kColumns);
    product({d_low.data() + at * s.rank, s.rank}, rows, turned, kColumns, s.rank, to, s.H, width, true);
  });
  // Every part of a sum is added to by one thread, tile after tile.
  const int64_t of_A = (s.H + kWords - 1) / kWords, of_B = (s.V + kWords - 1) / kWords;
  team.each(s.adapters * (of_A + of_B), [&](int64_t step) {
    const int64_t adapter = step / (of_A + of_B), part = step % (of_A + of_B);
    for (int64_t tile = 0; tile < s.tiles(); ++tile) {
      const int64_t at = tile * kTile, rows = s.count[tile];
      if (s.adapter[tile] != adapter || rows == 0) continue;
      if (part < of_A) {
        const int64_t first = part * kWords, width = std::min(kWords, s.H - first);
        product({s.hidden + at * s.H + first, 1, s.H}, width, d_low.data() + at * s.rank, s.rank, rows,
                sums_A + (adapter * s.H + first) * s.rank, s.rank, s.rank, true);
      } else {
        const int64_t first = (part - of_A) * kWords, width = std::min(kWords, s.V - first);
        product({low + at * s.rank, 1, s.rank}, s.rank, logits + at * s.V + first, s.V, rows,
                sums_B + adapter * s.rank * s.V + first, s.V, width, true);
      }
    }
  });
}

}  // namespace

void head_forward(Call& call) {
  Team team(call.threads);
  const Rows rows = rows_of(call, call.arguments);
  const Floats logits = call.results.floats(), low = call.results.floats(), totals = call.results.floats();
  forward(team, rows, logits.data, low.data, totals.data, call.results.floats().data);
}

void head_backward(Call& call) {
  Team team(call.threads);
  const Rows rows = rows_of(call, call.arguments);
  const Floats d_logp = call.arguments.floats(), low = call.arguments.floats(), totals = call.arguments.floats();
  call.arguments.skip(3);  // logits and sums, which become results
  const Floats d_hidden = call.results.floats(), logits = call.results.floats(), sums_A = call.results.floats();
  backward(team, rows, d_logp.data, logits.data, low.data, totals.data, d_hidden.data, sums_A.data,
           call.results.floats().data);
}

}  // namespace tinsmith

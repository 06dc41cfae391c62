// The layers of a dense model over a packed stream of sequences, forwards and backwards, with the gradients of
// adapters.
//
// native/training.py documents the arguments; trunk.py computes the same for what these do not support. A stream
// consists of tiles of 64 tokens, each of one sequence and one adapter. A tile's numbers depend on its own sequence
// alone, and gradients are added tile by tile in order, as by tile_products.py: neither the other tenants in the stream
// nor how a tenant's data were split into streams, nor the number of threads, changes a bit.
//
// T = tokens, n = tiles, H = hidden, I = inner, Q and K = queries and keys of all heads, D = head dim, L = layers, k =
// adapters, r = rank.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "call.h"
#include "frozen.h"
#include "products.h"
#include "room.h"
#include "team.h"
#include "vectors.h"

namespace tinsmith {
namespace {

enum { kQ, kK, kV, kO, kGate, kUp, kDown, kModules };
enum { kInputNorm, kQNorm, kKNorm, kPostNorm, kNorms };
enum { kQkv, kOut, kGateUp, kDownward, kMatrices };
enum { kInputs, kProjections, kAttended, kTotals, kMiddles, kInner, kLow, kSaved };

// The arrays of all layers; each layer's part follows the one before it, or with a stride of 0 takes its place.
struct Layered {
  float* all = nullptr;
  int64_t stride = 0;
  float* of(int64_t layer) const { return all + layer * stride; }
};

Layered layered(const Floats& array) { return {array.data, array.count() / array.dims[0]}; }

// A LoRA module: A [inputs, r] and B [r, outputs] of each adapter and layer.
struct Module {
  std::vector<Layered> A, B;  // of each adapter
  int64_t inputs, outputs, rank;

  void add(const Floats& of_A, const Floats& of_B) {  // with an axis of layers
    A.push_back(layered(of_A)), B.push_back(layered(of_B));
    inputs = of_A.dims[1], outputs = of_B.dims[2], rank = of_A.dims[2];
  }
  float* down(int64_t layer, int64_t adapter) const { return A[adapter].of(layer); }
  float* up(int64_t layer, int64_t adapter) const { return B[adapter].of(layer); }
};
using Modules = std::array<Module, kModules>;

// What both passes are given.
struct Stream {
  Team& team;
  float eps;
  bool rounds;
  const int32_t *count, *first_tile, *adapter;  // [n]; tokens in the tile, first tile of the sequence
  const float *scale, *cos, *sin;               // [n], [T, D / 2]
  std::array<Layered, kNorms> norms;
  std::array<FrozenLayers, kMatrices> matrices;
  Modules lora;
  std::array<Layered, kSaved> saved;
  int64_t layers, tokens, H, I, Q, K, D;

  int64_t tiles() const { return tokens / kTile; }
  int64_t heads() const { return Q / D; }
  int64_t rank() const { return lora[0].rank; }
  int64_t adapters() const { return lora[0].A.size(); }
  bool norms_heads() const { return norms[kQNorm].stride > 0; }
  bool used(int64_t tile) const { return count[tile] > 0; }
  const float* norm(int which, int64_t layer) const { return norms[which].of(layer); }
  Frozen matrix(int which, int64_t layer) const { return matrices[which].of(layer); }
  float* rows(int which, int64_t layer, int64_t tile, int64_t width) const {
    return saved[which].of(layer) + tile * kTile * width;
  }
  float* low(int64_t layer, int64_t tile, int module) const {
    return saved[kLow].of(layer) + (tile * kModules + module) * kTile * rank();
  }
};

// Prepares x [rows, size] for products by frozen matrices, until the same thread prepares others.
Inputs inputs_of(const Stream& s, const float* x, int64_t rows, int64_t size) {
  if (!s.rounds) return {x, nullptr, size};
  Pair* pairs = pair_scratch(rows * size / 2);
  pack(x, rows * size, pairs);
  return {x, pairs, size};
}

void norm_rows(const float* x, int64_t rows, const float* weight, int64_t size, float eps, float* to) {
  for (int64_t t = 0; t < rows; ++t) normed(x + t * size, weight, size, eps, to + t * size);
}

// Differentiates RMSNorm of one row by its input and adds to `d_x`.
void add_norm_backward(const float* d, const float* x, const float* weight, int64_t size, float eps, float* d_x) {
  const float scale = norm_scale(x, size, eps);
  Vec along{};
  for (int64_t i = 0; i < size; i += kLanes) {
    along += load(d + i, size - i) * load(weight + i, size - i) * load(x + i, size - i);
  }
  const float back = sum(along) * scale * scale * scale / static_cast<float>(size);
  for (int64_t i = 0; i < size; ++i) d_x[i] += d[i] * weight[i] * scale - x[i] * back;
}

// y (+)= x w + scale x A B for one tile and the columns of one module. z = scale x A stays, [kTile, r].
void adapted(const Stream& s, int64_t layer, int64_t tile, int module, const Inputs& x, Frozen w, int64_t w_row,
             float* y, int64_t y_row, bool adds = false) {
  const Module& lora = s.lora[module];
  const int64_t rows = s.count[tile];
  float* z = s.low(layer, tile, module);
  const Strided<float> from{x.floats, x.size};
  product(from, rows, lora.down(layer, s.adapter[tile]), lora.rank, x.size, z, lora.rank, lora.rank);
  for (int64_t i = 0; i < rows * lora.rank; ++i) z[i] *= s.scale[tile];
  product(x, rows, w, w_row, y, y_row, lora.outputs, adds);
  product({z, lora.rank}, rows, lora.up(layer, s.adapter[tile]), lora.outputs, lora.rank, y, y_row, lora.outputs, true);
}

// The queries, scaled, and the keys of one tile as attention wants them: normed and rotated. Queries are [kTile, Q];
// keys [kTile, K], and head by head transposed, [D, kTile].
void prepare_heads(const Stream& s, int64_t layer, int64_t tile, float* queries, float* keys, float* turned) {
  const float* from = s.rows(kProjections, layer, tile, s.Q + 2 * s.K);
  const float shrink = 1.0f / std::sqrt(static_cast<float>(s.D));
  for (int64_t t = 0; t < s.count[tile]; ++t, from += s.Q + 2 * s.K) {
    const int64_t angle = (tile * kTile + t) * s.D / 2;
    const auto prepare = [&](const float* head, int norm, float* to) {
      if (s.norms_heads()) {
        normed(head, s.norm(norm, layer), s.D, s.eps, to);
      } else {
        std::copy_n(head, s.D, to);
      }
      rotate(to, s.cos + angle, s.sin + angle, s.D);
    };
    for (int64_t at = 0; at < s.Q; at += s.D) {
      float* query = queries + t * s.Q + at;
      prepare(from + at, kQNorm, query);
      for (int64_t d = 0; d < s.D; ++d) query[d] *= shrink;
    }
    for (int64_t at = 0; at < s.K; at += s.D) {
      float* key = keys + t * s.K + at;
      prepare(from + s.Q + at, kKNorm, key);
    }
  }
  std::fill(keys + s.count[tile] * s.K, keys + kTile * s.K, 0.0f);
  transpose(keys, s.K, kTile, s.K, turned, kTile);
}

// Keys and values as all tiles see them.
struct Heads {
  explicit Heads(const Stream& s) : queries(s.tokens * s.Q), keys(s.tokens * s.K), turned(s.tokens * s.K) {}
  void prepare(const Stream& s, int64_t layer, int64_t tile) {
    const int64_t t = tile * kTile;
    prepare_heads(s, layer, tile, queries.data() + t * s.Q, keys.data() + t * s.K, turned.data() + t * s.K);
  }
  // The scores of a tile's queries for its sequence's keys up to its own: [kTile, number of keys].
  void scores(const Stream& s, int64_t tile, int64_t head, float* to) const {
    const int64_t first = s.first_tile[tile], seen = (tile - first + 1) * kTile, shared = s.Q / s.K;
    const float* from = queries.data() + tile * kTile * s.Q + head * s.D;
    for (int64_t of = first; of <= tile; ++of) {
      product({from, s.Q}, s.count[tile], turned.data() + of * kTile * s.K + head / shared * s.D * kTile, kTile, s.D,
              to + (of - first) * kTile, seen, kTile);
    }
    for (int64_t t = 0; t < s.count[tile]; ++t) {  // a token does not see those after it
      std::fill(to + t * seen + seen - kTile + t + 1, to + (t + 1) * seen, -std::numeric_limits<float>::infinity());
    }
  }
  Room queries, keys, turned;
};

void attend(const Stream& s, const Heads& heads, int64_t layer, int64_t tile, int64_t head) {
  const int64_t first = s.first_tile[tile], seen = (tile - first + 1) * kTile, width = s.Q + 2 * s.K;
  float* scores = scratch(0, kTile * seen);
  heads.scores(s, tile, head, scores);
  float* totals = s.rows(kTotals, layer, tile, s.heads());
  for (int64_t t = 0; t < s.count[tile]; ++t) {
    float* row = scores + t * seen;
    Vec high = load(row);
    for (int64_t i = kLanes; i < seen; i += kLanes) {
      const Vec part = load(row + i);
      high = part > high ? part : high;
    }
    float lanes[kLanes];
    store(lanes, high);
    const float highest = *std::max_element(lanes, lanes + kLanes);
    Vec total{};
    for (int64_t i = 0; i < seen; i += kLanes) {
      const Vec weight = exp(load(row + i) - highest);
      store(row + i, weight);
      total += weight;
    }
    const float whole = sum(total), scale = 1.0f / whole;
    for (int64_t i = 0; i < seen; i += kLanes) store(row + i, load(row + i) * scale);
    totals[t * s.heads() + head] = highest + std::log(whole);
  }
  const float* values = s.rows(kProjections, layer, first, width) + s.Q + s.K + head / (s.Q / s.K) * s.D;
  float* to = s.rows(kAttended, layer, tile, s.Q) + head * s.D;
  for (int64_t of = 0; of < seen; of += kTile) {  // in parts as long as the sampler's pages, so that both round alike
    product({scores + of, seen}, s.count[tile], values + of * width, width, kTile, to, s.Q, s.D, of > 0);
  }
}

void before_attention(const Stream& s, int64_t layer, int64_t tile, Heads& heads) {
  const int64_t width = s.Q + 2 * s.K;
  float* normed = scratch(0, kTile * s.H);
  float* to = s.rows(kProjections, layer, tile, width);
  norm_rows(s.rows(kInputs, layer, tile, s.H), s.count[tile], s.norm(kInputNorm, layer), s.H, s.eps, normed);
  const Frozen qkv = s.matrix(kQkv, layer);
  const Inputs inputs = inputs_of(s, normed, s.count[tile], s.H);
  adapted(s, layer, tile, kQ, inputs, qkv, width, to, width);
  adapted(s, layer, tile, kK, inputs, qkv.from(s.Q), width, to + s.Q, width);
  adapted(s, layer, tile, kV, inputs, qkv.from(s.Q + s.K), width, to + s.Q + s.K, width);
  std::fill(to + s.count[tile] * width, to + kTile * width, 0.0f);  // values of no token, which are multiplied by 0
  heads.prepare(s, layer, tile);
}

// inner = silu(gate) up, of rows [gate | up].
void gate(const Stream& s, int64_t rows, const float* gate_up, float* inner) {
  for (int64_t t = 0; t < rows; ++t, gate_up += 2 * s.I, inner += s.I) {
    for (int64_t i = 0; i < s.I; i += kLanes) {
      const Vec value = load(gate_up + i, s.I - i);
      store(inner + i, value / (exp(-value) + 1.0f) * load(gate_up + s.I + i, s.I - i), s.I - i);
    }
  }
}

void after_attention(const Stream& s, int64_t layer, int64_t tile, float* out) {
  const int64_t rows = s.count[tile];
  float* normed = scratch(0, kTile * s.H);
  float* inner = scratch(1, kTile * s.I);
  const float* attended = s.rows(kAttended, layer, tile, s.Q);
  float* middle = s.rows(kMiddles, layer, tile, s.H);
  std::copy_n(s.rows(kInputs, layer, tile, s.H), rows * s.H, middle);
  adapted(s, layer, tile, kO, inputs_of(s, attended, rows, s.Q), s.matrix(kOut, layer), s.H, middle, s.H, true);
  norm_rows(middle, rows, s.norm(kPostNorm, layer), s.H, s.eps, normed);
  float* gate_up = s.rows(kInner, layer, tile, 2 * s.I);
  const Inputs inputs = inputs_of(s, normed, rows, s.H);
  adapted(s, layer, tile, kGate, inputs, s.matrix(kGateUp, layer), 2 * s.I, gate_up, 2 * s.I);
  adapted(s, layer, tile, kUp, inputs, s.matrix(kGateUp, layer).from(s.I), 2 * s.I, gate_up + s.I, 2 * s.I);
  gate(s, rows, gate_up, inner);
  std::copy_n(middle, rows * s.H, out);
  adapted(s, layer, tile, kDown, inputs_of(s, inner, rows, s.I), s.matrix(kDownward, layer), s.H, out, s.H, true);
}

void forward(const Stream& s, const float* x, float* out) {
  Heads heads(s);
  s.team.each(s.tiles(), [&](int64_t tile) {
    const int64_t at = tile * kTile * s.H;
    std::copy_n(x + at, s.count[tile] * s.H, s.rows(kInputs, 0, tile, s.H));
    std::fill(out + at + s.count[tile] * s.H, out + at + kTile * s.H, 0.0f);
  });
  for (int64_t layer = 0; layer < s.layers; ++layer) {
    s.team.each(s.tiles(), [&](int64_t tile) {
      if (s.used(tile)) before_attention(s, layer, tile, heads);
    });
    s.team.each(s.tiles() * s.heads(), [&](int64_t at) {
      const int64_t tile = s.tiles() - 1 - at / s.heads();  // the last tiles of long sequences take longest
      if (s.used(tile)) attend(s, heads, layer, tile, at % s.heads());
    });
    s.team.each(s.tiles(), [&](int64_t tile) {
      if (!s.used(tile)) return;
      const bool last = layer == s.layers - 1;
      after_attention(s, layer, tile, last ? out + tile * kTile * s.H : s.rows(kInputs, layer + 1, tile, s.H));
    });
  }
}

// The backward pass of one layer after the other.
class Backward {
 public:
  Backward(const Stream& s, Modules before, Modules sums, float* d_x)
      : s_(s),
        before_(std::move(before)),
        sums_(std::move(sums)),
        d_x_(d_x),
        heads_(s),
        normed_in_(s.tokens * s.H),
        normed_middle_(s.tokens * s.H),
        inner_(s.tokens * s.I),
        d_out_(s.tokens * s.H),
        d_middle_(s.tokens * s.H),
        d_inner_(s.tokens * 2 * s.I),
        d_attended_(s.tokens * s.Q),
        d_heads_(s.tokens * (s.Q + 2 * s.K)),
        d_low_(s.tokens * kModules * s.rank()),
        tiles_of_(s.adapters()) {
    for (int64_t tile = 0; tile < s.tiles(); ++tile) {
      if (!s.used(tile)) continue;
      if (s.first_tile[tile] == tile) sequences_.push_back({tile, tile});
      sequences_.back().second = tile + 1;
      tiles_of_[s.adapter[tile]].push_back(tile);
    }
  }

  void run() {
    for (int64_t layer = s_.layers - 1; layer >= 0; --layer) {
      s_.team.each(s_.tiles(), [&](int64_t tile) {
        if (s_.used(tile)) down_to_attention(layer, tile);
      });
      s_.team.each(sequences_.size() * s_.K / s_.D, [&](int64_t at) {
        const auto& [first, end] = sequences_[at / (s_.K / s_.D)];
        through_attention(layer, first, end, at % (s_.K / s_.D));
      });
      s_.team.each(s_.tiles(), [&](int64_t tile) {
        if (s_.used(tile)) down_to_inputs(layer, tile);
      });
      add_gradients(layer);
    }
  }

 private:
  int64_t width() const { return s_.Q + 2 * s_.K; }
  float* d_low(int64_t tile, int module) { return d_low_.data() + (tile * kModules + module) * kTile * s_.rank(); }

  // Differentiates `adapted` of modules that read the same x and write beside each other: d_x [kTile, inputs] = d w^T +
  // d_z A^T of each module, if `d_x` is not null, and d_z = scale d B^T stays.
  //
  // All of it is transposed, with a token in each lane: no sum goes across lanes then.
  void adapted_backward(int64_t layer, int64_t tile, std::initializer_list<int> modules, const float* d, Frozen w,
                        float* d_x) {
    const int64_t inputs = s_.lora[*modules.begin()].inputs, rank = s_.rank(), rows = s_.count[tile];
    const int64_t lanes = (rows + kLanes - 1) / kLanes * kLanes;  // those past the tokens hold anything
    int64_t outputs = 0;
    for (const int module : modules) outputs += s_.lora[module].outputs;
    float* turned = scratch(4, outputs * kTile);
    float* result = scratch(5, inputs * kTile);
    float* low = scratch(2, rank * kTile);
    transpose(d, outputs, rows, outputs, turned, kTile);
    if (d_x != nullptr) {
      Pair* packed = s_.rounds ? pair_scratch(outputs / 2 * kTile) : nullptr;
      product_of_lanes(w, inputs, outputs, turned, kTile, packed, result, kTile, lanes);
    }
    for (const int module : modules) {
      const Module& lora = s_.lora[module];
      product({lora.up(layer, s_.adapter[tile]), lora.outputs}, rank, turned, kTile, lora.outputs, low, kTile, lanes);
      for (int64_t i = 0; i < rank * kTile; ++i) low[i] *= s_.scale[tile];
      transpose(low, kTile, rank, rows, d_low(tile, module), rank);
      if (d_x != nullptr) {
        product({lora.down(layer, s_.adapter[tile]), rank}, inputs, low, kTile, rank, result, kTile, lanes, true);
      }
      turned += lora.outputs * kTile;
    }
    if (d_x != nullptr) transpose(result, kTile, inputs, rows, d_x, inputs);
  }

  void down_to_attention(int64_t layer, int64_t tile) {
    const int64_t t = tile * kTile, rows = s_.count[tile];
    heads_.prepare(s_, layer, tile);
    float* d_out = d_out_.data() + t * s_.H;
    std::copy_n(d_x_ + t * s_.H, rows * s_.H, d_out);
    const float* gate_up = s_.rows(kInner, layer, tile, 2 * s_.I);
    gate(s_, rows, gate_up, inner_.data() + t * s_.I);
    float* d_inner = scratch(0, kTile * s_.I);
    adapted_backward(layer, tile, {kDown}, d_out, s_.matrix(kDownward, layer), d_inner);
    float* d_gate_up = d_inner_.data() + t * 2 * s_.I;
    gate_backward(rows, gate_up, d_inner, d_gate_up);
    const float* middle = s_.rows(kMiddles, layer, tile, s_.H);
    norm_rows(middle, rows, s_.norm(kPostNorm, layer), s_.H, s_.eps, normed_middle_.data() + t * s_.H);
    float* d_normed = scratch(1, kTile * s_.H);
    adapted_backward(layer, tile, {kGate, kUp}, d_gate_up, s_.matrix(kGateUp, layer), d_normed);
    float* d_middle = d_middle_.data() + t * s_.H;
    std::copy_n(d_out, rows * s_.H, d_middle);
    for (int64_t row = 0; row < rows; ++row) {
      add_norm_backward(d_normed + row * s_.H, middle + row * s_.H, s_.norm(kPostNorm, layer), s_.H, s_.eps,
                        d_middle + row * s_.H);
    }
    float* d_attended = d_attended_.data() + t * s_.Q;
    adapted_backward(layer, tile, {kO}, d_middle, s_.matrix(kOut, layer), d_attended);
  }

  void gate_backward(int64_t rows, const float* gate_up, const float* d_inner, float* d) {
    for (int64_t t = 0; t < rows; ++t, gate_up += 2 * s_.I, d_inner += s_.I, d += 2 * s_.I) {
      for (int64_t i = 0; i < s_.I; i += kLanes) {
        const int64_t left = s_.I - i;
        const Vec value = load(gate_up + i, left), up = load(gate_up + s_.I + i, left),
                  d_value = load(d_inner + i, left);
        const Vec sigmoid = 1.0f / (exp(-value) + 1.0f);
        store(d + i, d_value * up * sigmoid * (1.0f + value * (1.0f - sigmoid)), left);
        store(d + s_.I + i, d_value * value * sigmoid, left);
      }
    }
  }

  // Differentiates the attention of one sequence by its queries, and by one head of keys and values, which they share.
  void through_attention(int64_t layer, int64_t first, int64_t end, int64_t kv_head) {
    const int64_t group = s_.Q / s_.K, W = width(), keys_at = s_.Q + kv_head * s_.D, values_at = keys_at + s_.K;
    const float shrink = 1.0f / std::sqrt(static_cast<float>(s_.D));
    float* d = d_heads_.data() + first * kTile * W;
    for (int64_t t = 0; t < (end - first) * kTile; ++t) {
      std::fill_n(d + t * W + keys_at, s_.D, 0.0f);
      std::fill_n(d + t * W + values_at, s_.D, 0.0f);
    }
    const float* keys = heads_.keys.data() + first * kTile * s_.K + kv_head * s_.D;
    const float* values = s_.rows(kProjections, layer, first, W) + values_at;
    std::vector<float> turned((end - first) * kTile * s_.D);
    for (int64_t t = 0; t < (end - first) * kTile; t += kTile) {
      transpose(values + t * W, W, kTile, s_.D, turned.data() + t * s_.D, kTile);
    }
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      for (int64_t tile = first; tile < end; ++tile) {
        const int64_t seen = (tile - first + 1) * kTile, rows = s_.count[tile];
        float* shares = scratch(0, kTile * seen);
        float* d_scores = scratch(1, kTile * seen);
        heads_.scores(s_, tile, head, shares);
        const float* queries = heads_.queries.data() + tile * kTile * s_.Q + head * s_.D;
        const float* out = s_.rows(kAttended, layer, tile, s_.Q) + head * s_.D;
        const float* d_out = d_attended_.data() + tile * kTile * s_.Q + head * s_.D;
        const float* totals = s_.rows(kTotals, layer, tile, s_.heads());
        for (int64_t of = 0; of < seen; of += kTile) {
          product({d_out, s_.Q}, rows, turned.data() + of * s_.D, kTile, s_.D, d_scores + of, seen, kTile);
        }
        for (int64_t t = 0; t < rows; ++t) {
          Vec along{};
          for (int64_t i = 0; i < s_.D; i += kLanes) {
            along += load(out + t * s_.Q + i, s_.D - i) * load(d_out + t * s_.Q + i, s_.D - i);
          }
          const float delta = sum(along), total = totals[t * s_.heads() + head];
          float *share = shares + t * seen, *d_score = d_scores + t * seen;
          for (int64_t i = 0; i < seen; i += kLanes) {
            const Vec weight = exp(load(share + i) - total);
            store(share + i, weight);
            store(d_score + i, weight * (load(d_score + i) - delta));
          }
        }
        float* d_queries = d_heads_.data() + tile * kTile * W + head * s_.D;
        product({d_scores, seen}, rows, keys, s_.K, seen, d_queries, W, s_.D);
        for (int64_t t = 0; t < rows; ++t) {
          for (int64_t i = 0; i < s_.D; ++i) d_queries[t * W + i] *= shrink;
        }
        product({d_scores, 1, seen}, seen, queries, s_.Q, rows, d + keys_at, W, s_.D, true);
        product({shares, 1, seen}, seen, d_out, s_.Q, rows, d + values_at, W, s_.D, true);
      }
    }
  }

  void down_to_inputs(int64_t layer, int64_t tile) {
    const int64_t t = tile * kTile, W = width(), rows = s_.count[tile];
    const float* projections = s_.rows(kProjections, layer, tile, W);
    float* d = d_heads_.data() + t * W;
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t angle = (t + row) * s_.D / 2;
      for (int64_t at = 0; at < s_.Q + s_.K; at += s_.D) {
        head_backward(projections + row * W + at, at < s_.Q ? kQNorm : kKNorm, layer, angle, d + row * W + at);
      }
    }
    const float* inputs = s_.rows(kInputs, layer, tile, s_.H);
    norm_rows(inputs, rows, s_.norm(kInputNorm, layer), s_.H, s_.eps, normed_in_.data() + t * s_.H);
    float* d_normed = layer > 0 ? scratch(0, kTile * s_.H) : nullptr;  // nobody asks for the embedding's gradient
    adapted_backward(layer, tile, {kQ, kK, kV}, d, s_.matrix(kQkv, layer), d_normed);
    if (layer == 0) return;
    float* d_x = d_x_ + t * s_.H;
    std::copy_n(d_middle_.data() + t * s_.H, rows * s_.H, d_x);
    for (int64_t row = 0; row < rows; ++row) {
      add_norm_backward(d_normed + row * s_.H, inputs + row * s_.H, s_.norm(kInputNorm, layer), s_.H, s_.eps,
                        d_x + row * s_.H);
    }
  }

  // Undoes the rotation, and differentiates the norm of a head if there is one; `d` in place.
  void head_backward(const float* head, int norm, int64_t layer, int64_t angle, float* d) {
    for (int64_t i = 0; i < s_.D / 2; ++i) {
      const float first = d[i], second = d[i + s_.D / 2], cos = s_.cos[angle + i], sin = s_.sin[angle + i];
      d[i] = first * cos + second * sin;
      d[i + s_.D / 2] = second * cos - first * sin;
    }
    if (!s_.norms_heads()) return;
    float* by_head = scratch(3, s_.D);
    std::fill_n(by_head, s_.D, 0.0f);
    add_norm_backward(d, head, s_.norm(norm, layer), s_.D, s_.eps, by_head);
    std::copy_n(by_head, s_.D, d);
  }

  // Adds each tile's gradients of A and B to what the sums of its adapter were before, in the order of tiles. The sums
  // of adapters without tiles are left as they are: nobody asks for them.
  void add_gradients(int64_t layer) {
    struct Inputs {
      const float* x;
      int64_t x_row;
      const float* d;
      int64_t d_row;
    };
    const float* d_inner = d_inner_.data();
    const float* d_heads = d_heads_.data();
    const float* attended = s_.saved[kAttended].of(layer);
    const std::array<Inputs, kModules> all{{
        {normed_in_.data(), s_.H, d_heads, width()},
        {normed_in_.data(), s_.H, d_heads + s_.Q, width()},
        {normed_in_.data(), s_.H, d_heads + s_.Q + s_.K, width()},
        {attended, s_.Q, d_middle_.data(), s_.H},
        {normed_middle_.data(), s_.H, d_inner, 2 * s_.I},
        {normed_middle_.data(), s_.H, d_inner + s_.I, 2 * s_.I},
        {inner_.data(), s_.I, d_out_.data(), s_.H},
    }};
    struct Part {
      int module;
      int64_t adapter, first, count;
      bool of_A;
    };
    constexpr int64_t kPart = 256;
    std::vector<Part> parts;
    for (int64_t adapter = 0; adapter < static_cast<int64_t>(tiles_of_.size()); ++adapter) {
      if (tiles_of_[adapter].empty()) continue;
      for (int module = 0; module < kModules; ++module) {
        for (const bool of_A : {true, false}) {
          const int64_t size = of_A ? s_.lora[module].inputs : s_.lora[module].outputs;
          for (int64_t first = 0; first < size; first += kPart) {
            parts.push_back({module, adapter, first, std::min(kPart, size - first), of_A});
          }
        }
      }
    }
    s_.team.each(parts.size(), [&](int64_t at) {
      const Part& part = parts[at];
      const Module &sum = sums_[part.module], &before = before_[part.module];
      const Inputs& in = all[part.module];
      if (part.of_A) {
        const int64_t at = part.first * sum.rank;
        std::copy_n(before.down(layer, part.adapter) + at, part.count * sum.rank, sum.down(layer, part.adapter) + at);
      } else {
        for (int64_t row = 0; row < sum.rank; ++row) {
          const int64_t at = row * sum.outputs + part.first;
          std::copy_n(before.up(layer, part.adapter) + at, part.count, sum.up(layer, part.adapter) + at);
        }
      }
      for (const int64_t tile : tiles_of_[part.adapter]) {
        const int64_t t = tile * kTile, rows = s_.count[tile];
        if (part.of_A) {
          product({in.x + t * in.x_row + part.first, 1, in.x_row}, part.count, d_low(tile, part.module), sum.rank, rows,
                  sum.down(layer, part.adapter) + part.first * sum.rank, sum.rank, sum.rank, true);
        } else {
          product({s_.low(layer, tile, part.module), 1, sum.rank}, sum.rank, in.d + t * in.d_row + part.first, in.d_row,
                  rows, sum.up(layer, part.adapter) + part.first, sum.outputs, part.count, true);
        }
      }
    });
  }

  const Stream& s_;
  const Modules before_, sums_;
  float* const d_x_;
  Heads heads_;
  Room normed_in_, normed_middle_, inner_, d_out_, d_middle_, d_inner_, d_attended_, d_heads_, d_low_;
  std::vector<std::vector<int64_t>> tiles_of_;          // of each adapter
  std::vector<std::pair<int64_t, int64_t>> sequences_;  // first tile, and the one after the last
};

Modules modules_of(int64_t adapters, Arrays& given) {
  Modules modules;
  for (int64_t adapter = 0; adapter < adapters; ++adapter) {
    for (Module& module : modules) {
      const Floats A = given.floats();
      module.add(A, given.floats());
    }
  }
  return modules;
}

// Takes what both passes are given after the first argument, which is of the tokens [T, H].
Stream stream_of(Team& team, const Call& call, const Floats& of_tokens, Arrays& given) {
  const Ints count = given.ints(), first = given.ints(), adapter = given.ints();
  const Floats scale = given.floats(), cos = given.floats(), sin = given.floats();
  Stream s{team, call.eps, call.rounds, count.data, first.data, adapter.data, scale.data, cos.data, sin.data};
  std::array<Array, kMatrices> matrices;  // [L, inputs, outputs] each
  for (int which = 0; which < kMatrices; ++which) {
    matrices[which] = given.any();
    s.matrices[which] = frozen_layers(matrices[which]);
  }
  for (int which = 0; which < kNorms; ++which) s.norms[which] = layered(given.floats());
  s.lora = modules_of(call.adapters, given);
  s.layers = matrices[kQkv].dims[0];
  s.tokens = of_tokens.dims[0], s.H = of_tokens.dims[1];
  s.I = matrices[kDownward].dims[1];
  s.Q = matrices[kOut].dims[1];
  s.K = (matrices[kQkv].dims[2] - s.Q) / 2;
  s.D = 2 * cos.dims[1];
  return s;
}

}  // namespace

void training_forward(Call& call) {
  Team team(call.threads);
  const Floats x = call.arguments.floats(), out = call.results.floats();
  Stream s = stream_of(team, call, x, call.arguments);
  std::optional<Room> own;  // of one layer, if nothing is to be saved
  if (call.results.left() == 0) {
    const int64_t width = s.Q + 2 * s.K;
    const std::array<int64_t, kSaved> sizes{s.H, width, s.Q, s.heads(), s.H, 2 * s.I, kModules * s.rank()};
    int64_t total = 0;
    for (const int64_t size : sizes) total += size * s.tokens;
    own.emplace(total);
    int64_t at = 0;
    for (int which = 0; which < kSaved; at += sizes[which++] * s.tokens) s.saved[which] = {own->data() + at, 0};
  } else {
    for (int which = 0; which < kSaved; ++which) s.saved[which] = layered(call.results.floats());
  }
  forward(s, x.data, out.data);
}

void training_backward(Call& call) {
  Team team(call.threads);
  const Floats d_out = call.arguments.floats();
  Stream s = stream_of(team, call, d_out, call.arguments);
  for (int which = 0; which < kSaved; ++which) s.saved[which] = layered(call.arguments.floats());
  Modules before = modules_of(call.adapters, call.arguments), sums = modules_of(call.adapters, call.results);
  std::vector<float> d_x(d_out.data, d_out.data + d_out.count());
  Backward(s, std::move(before), std::move(sums), d_x.data()).run();
}

}  // namespace tinsmith

// The layers of a dense model over rows, each a token of some sequence, and the draw of tokens from logits. Some layers
// may mix tokens by a recurrence, in place of attention.
//
// decode.py documents the arguments, and computes the same for what these do not support. A row's bits depend on its
// own sequence alone: every number is one sum in a fixed order, however many rows and threads there are.
//
// N = rows, H = hidden, V = vocabulary, L = layers, P = pages, G = pages of a sequence, C = positions of a page, J =
// heads of keys and values, D = head dim, R = adapters.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "call.h"
#include "frozen.h"
#include "products.h"
#include "recurrence.h"
#include "team.h"
#include "vectors.h"

namespace tinsmith {
namespace {

constexpr int64_t kRowBlock = 8, kChannels = 64;

// A LoRA module of all layers and adapters: A [L, R, inputs, rank] and B [L, R, rank, outputs]. Each adapter has a rank
// of its own, beyond which nothing is read, and a scale, which is not in A or B.
struct Module {
  const float* a;
  const float* b;
  int64_t adapters, inputs, rank, outputs;

  Module(const Floats& A, const Floats& B)
      : a(A.data), b(B.data), adapters(A.dims[-3]), inputs(A.dims[-2]), rank(A.dims[-1]), outputs(B.dims[-1]) {}
  const float* down(int64_t layer, int64_t row) const { return a + (layer * adapters + row) * inputs * rank; }
  const float* up(int64_t layer, int64_t row) const { return b + (layer * adapters + row) * rank * outputs; }
};

// Rows that follow each other and have one adapter.
struct RowBlock {
  int64_t first, count;
  int32_t adapter;
};

// Columns of a module, and where they are among those of modules that are multiplied together.
struct Columns {
  int module;
  int64_t first, count, place;
};

struct Row {
  int64_t number;  // among all rows
  int64_t position;
  int64_t tile;  // tokens of a sequence that come together
  const int32_t* pages;
  int32_t adapter;
  const float *cos, *sin;
  int64_t rotated;  // dimensions of a head
};

// A matrix of all layers [L, inputs, outputs].
struct Matrix {
  Array array;

  int64_t inputs() const { return array.dims[1]; }
  int64_t of_layer(int64_t layer) const { return layer * (array.count() / array.dims[0]); }
};

// What a token passes through, and what is beside it.
struct Model {
  Floats input_norm, q_norm, k_norm, post_norm, final_norm;
  Matrix qkv, o, gate_up, down;
  Array head;                // [V, H]
  std::vector<Module> lora;  // q, k, v, o, gate, up, down, head; then the recurrence's
  const int32_t* rank;       // of each adapter
  const float* scale;        // likewise
  float eps;
  bool rounds;
  bool recurs;  // some layers do, and what follows is there
  Ints is_recurrent;  // [L]
  Matrix delta_in, delta_o;
  Recurrence recurrence;
};
enum { kQ, kK, kV, kO, kGate, kUp, kDown, kHead, kDeltaMixed, kDeltaGate, kDeltaBeta, kDeltaDecay, kDeltaO };

class Pass {
 public:
  // `runs` of a recurrence: unless they `follow` each other, no state is common to two of them.
  Pass(Team& team, const Model& model, std::vector<Row> rows, std::vector<Run> runs, bool follow, float* keys,
       float* values, Dims cache)
      : team_(team),
        m_(model),
        rows_(std::move(rows)),
        runs_(std::move(runs)),
        follow_(follow),
        keys_(keys),
        values_(values),
        pages_(cache[1]),
        J_(cache[2]),
        D_(cache[3]),
        C_(cache[4]),
        H_(model.final_norm.dims[0]),
        Q_(model.o.inputs()),
        KV_(J_ * D_),
        of_queries_(model.lora[kQ].outputs),
        I_(model.down.inputs()),
        N_(static_cast<int64_t>(rows_.size())),
        normed_(N_ * H_),
        packed_(model.rounds ? N_ * std::max({H_, Q_, I_}) / 2 : 0),
        low_(N_ * (model.recurs ? 4 : 3) * model.lora[kQ].rank) {
    for (int64_t n = 0; n < N_; ++n) {
      const bool begins =
          blocks_.empty() || blocks_.back().adapter != rows_[n].adapter || blocks_.back().count == kRowBlock;
      if (begins) blocks_.push_back({n, 0, rows_[n].adapter});
      ++blocks_.back().count;
    }
  }

  // x [N, H] becomes the normed hidden states.
  void layers(float* x) {
    std::vector<float> inner(N_ * I_);
    int64_t attending = 0, recurring = 0;
    for (int64_t layer = 0; layer < m_.gate_up.array.dims[0]; ++layer) {
      norm(x, of_layer(m_.input_norm, layer));
      if (m_.recurs && m_.is_recurrent.data[layer] != 0) {
        recur(recurring++, x);
      } else {
        attend(attending++, x);
      }
      norm(x, of_layer(m_.post_norm, layer));
      const Inputs middle = inputs(normed_.data(), H_);
      lower(middle, layer, {kGate, kUp});
      const auto gates = split({{kGate, I_}});
      team_.each(gates.size(), [&](int64_t at) {
        const Columns& c = gates[at];
        std::vector<float>& up = of_thread();
        up.resize(N_ * c.count);
        float* gate = inner.data() + c.first;
        multiply(middle, m_.gate_up, 2 * I_, c, layer, 0, gate, I_, false);
        const Columns same_of_up{kUp, c.first, c.count, I_ + c.first};
        multiply(middle, m_.gate_up, 2 * I_, same_of_up, layer, 1, up.data(), c.count, false);
        for (int64_t n = 0; n < N_; ++n) gated(gate + n * I_, up.data() + n * c.count, c.count);
      });
      add(inputs(inner.data(), I_), m_.down, kDown, layer, x);
    }
    norm(x, m_.final_norm.data);
    std::copy(normed_.begin(), normed_.end(), x);
  }

  // The logits of all rows: those of `rows()[n]` go to row `number` of [_, V].
  void logits(const float* hidden, float* logits_NV) {
    const int64_t V = m_.head.dims[0];
    const Inputs x = inputs(hidden, H_);
    const Frozen head = frozen(m_.head);
    lower(x, 0, {kHead});
    const auto parts = split({{kHead, V}});
    team_.each(parts.size(), [&](int64_t at) {
      const Columns& c = parts[at];
      std::vector<float>& found = of_thread();
      found.resize(N_ * c.count);
      if (m_.rounds) {
        const auto* rows = reinterpret_cast<const Pair*>(head.narrow + c.first * H_);
        dots(x.pairs, H_ / 2, N_, rows, H_ / 2, H_ / 2, found.data(), c.count, c.count);
      } else if (head.narrow != nullptr) {
        dots(hidden, H_, N_, head.narrow + c.first * H_, H_, H_, found.data(), c.count, c.count);
      } else {
        dots(hidden, H_, N_, head.wide + c.first * H_, H_, H_, found.data(), c.count, c.count);
      }
      adapt(c, 0, 0, found.data(), c.count);
      for (int64_t n = 0; n < N_; ++n) {
        std::copy_n(found.data() + n * c.count, c.count, logits_NV + rows_[n].number * V + c.first);
      }
    });
  }

 private:
  static std::vector<float>& of_thread() {
    thread_local std::vector<float> floats;
    return floats;
  }

  static const float* of_layer(const Floats& all, int64_t layer) {
    return all.data + layer * (all.count() / all.dims[0]);
  }

  // Adds to x what a layer's attention makes of the normed rows. `layer` counts those that attend.
  void attend(int64_t layer, float* x) {
    const int64_t size = of_queries_ + 2 * KV_;
    std::vector<float> qkv(N_ * size), attended(N_ * Q_);
    const Inputs before = inputs(normed_.data(), H_);
    lower(before, layer, {kQ, kK, kV});
    const auto projections = split({{kQ, of_queries_}, {kK, KV_}, {kV, KV_}});
    team_.each(projections.size(), [&](int64_t at) {
      const Columns& c = projections[at];
      multiply(before, m_.qkv, size, c, layer, c.module - kQ, qkv.data() + c.place, size, false);
    });
    const bool norms_heads = m_.q_norm.count() > 0;
    team_.each(N_ * J_, [&](int64_t at) {
      write(rows_[at / J_], layer, at % J_, qkv.data() + at / J_ * size + of_queries_,
            norms_heads ? of_layer(m_.k_norm, layer) : nullptr);
    });
    team_.each(N_ * J_, [&](int64_t at) {
      attend(rows_[at / J_], layer, at % J_, qkv.data() + at / J_ * size,
             norms_heads ? of_layer(m_.q_norm, layer) : nullptr, attended.data() + at / J_ * Q_);
    });
    add(inputs(attended.data(), Q_), m_.o, kO, layer, x);
  }

  // Adds to x what a layer's recurrence makes of the normed rows. `layer` counts those that have one.
  void recur(int64_t layer, float* x) {
    const Recurrence& rule = m_.recurrence;
    const int64_t size = rule.projected(), C = rule.channels(), V = rule.values(), heads = rule.heads();
    std::vector<float> projected(N_ * size), convolved(N_ * C), out(N_ * V);
    const Inputs before = inputs(normed_.data(), H_);
    lower(before, layer, {kDeltaMixed, kDeltaGate, kDeltaBeta, kDeltaDecay});
    const auto projections = split({{kDeltaMixed, C}, {kDeltaGate, V}, {kDeltaBeta, heads}, {kDeltaDecay, heads}});
    team_.each(projections.size(), [&](int64_t at) {
      const Columns& c = projections[at];
      multiply(before, m_.delta_in, size, c, layer, c.module - kDeltaMixed, projected.data() + c.place, size, false);
    });
    each_run((C + kChannels - 1) / kChannels, [&](const Run& run, int64_t block) {
      const int64_t first = block * kChannels;
      rule.convolve(layer, run, projected.data(), first, std::min(kChannels, C - first), convolved.data());
    });
    each_run(heads, [&](const Run& run, int64_t head) {
      rule.advance(layer, run, head, projected.data(), convolved.data(), out.data());
    });
    add(inputs(out.data(), V), m_.delta_o, kDeltaO, layer, x);
  }

  // Calls step(run, part) for all runs and parts.
  template <typename Step>
  void each_run(int64_t parts, Step step) {
    const int64_t number = static_cast<int64_t>(runs_.size());
    if (follow_) {
      team_.each(parts, [&](int64_t part) {
        for (const Run& run : runs_) step(run, part);
      });
    } else {
      team_.each(number * parts, [&](int64_t at) { step(runs_[at / parts], at % parts); });
    }
  }

  void norm(const float* x, const float* weight) {
    team_.each(N_, [&](int64_t n) { normed(x + n * H_, weight, H_, m_.eps, normed_.data() + n * H_); });
  }

  // Prepares x [N, size] for products, until others are prepared.
  Inputs inputs(const float* x, int64_t size) {
    if (!m_.rounds) return {x, nullptr, size};
    team_.each(N_, [&](int64_t n) { pack(x + n * size, size, packed_.data() + n * size / 2); });
    return {x, packed_.data(), size};
  }

  // Multiplies with scaled A of modules that read the same input: low_ [modules, N, rank]. The scale comes after the sum,
  // as in training.
  void lower(const Inputs& x, int64_t layer, std::initializer_list<int> modules) {
    const int64_t number = static_cast<int64_t>(modules.size());
    team_.each(number * static_cast<int64_t>(blocks_.size()), [&](int64_t at) {
      const RowBlock& rows = blocks_[at / number];
      const Module& module = m_.lora[*(modules.begin() + at % number)];
      if (rows.adapter < 0) return;
      float* low = low_.data() + (at % number * N_ + rows.first) * module.rank;
      const int64_t rank = m_.rank[rows.adapter];
      product({x.floats + rows.first * x.size, x.size}, rows.count, module.down(layer, rows.adapter), module.rank,
              x.size, low, module.rank, rank);
      for (int64_t n = 0; n < rows.count; ++n, low += module.rank) {
        for (int64_t i = 0; i < rank; ++i) low[i] *= m_.scale[rows.adapter];
      }
    });
  }

  // Adds to y what B makes of what `lower` left, for some columns of its `which`-th module.
  void adapt(const Columns& c, int64_t layer, int which, float* y, int64_t y_row) {
    const Module& module = m_.lora[c.module];
    for (const RowBlock& rows : blocks_) {
      if (rows.adapter < 0) continue;
      product({low_.data() + (which * N_ + rows.first) * module.rank, module.rank}, rows.count,
              module.up(layer, rows.adapter) + c.first, module.outputs, m_.rank[rows.adapter], y + rows.first * y_row,
              y_row, c.count, true);
    }
  }

  // y (+)= x w + x A B for some columns, which are at `place` of w.
  void multiply(const Inputs& x, const Matrix& w, int64_t w_row, const Columns& c, int64_t layer, int which, float* y,
                int64_t y_row, bool adds) {
    product(x, N_, frozen(w.array).from(w.of_layer(layer) + c.place), w_row, y, y_row, c.count, adds);
    adapt(c, layer, which, y, y_row);
  }

  void add(const Inputs& from, const Matrix& w, int module, int64_t layer, float* x) {
    lower(from, layer, {module});
    const auto parts = split({{module, H_}});
    team_.each(parts.size(),
               [&](int64_t at) { multiply(from, w, H_, parts[at], layer, 0, x + parts[at].first, H_, true); });
  }

  // Divides the columns of modules that lie beside each other.
  static std::vector<Columns> split(std::initializer_list<std::pair<int, int64_t>> modules) {
    std::vector<Columns> parts;
    int64_t place = 0;
    for (const auto& [module, size] : modules) {
      const int64_t width = size > 2048 ? 512 : size > 1024 ? 384 : size > 512 ? 256 : 64;
      for (int64_t first = 0; first < size; first += width) {
        parts.push_back({module, first, std::min(width, size - first), place + first});
      }
      place += size;
    }
    return parts;
  }

  static void gated(float* gate, const float* up, int64_t count) {
    for (int64_t i = 0; i < count; i += kLanes) {
      const Vec value = load(gate + i, count - i);
      store(gate + i, value / (exp(-value) + 1.0f) * load(up + i, count - i), count - i);
    }
  }

  int64_t page_of(const Row& row, int64_t layer, int64_t head, int64_t page) const {
    return ((layer * pages_ + row.pages[page]) * J_ + head) * D_ * C_;
  }

  // Writes a head's key and value: keys are [D, C] in a page, values [C, D].
  void write(const Row& row, int64_t layer, int64_t head, float* keys, const float* weight) {
    float* key = keys + head * D_;
    const float* value = keys + KV_ + head * D_;
    if (weight != nullptr) normed(key, weight, D_, m_.eps, key);
    rotate(key, row.cos, row.sin, row.rotated);
    const int64_t page = page_of(row, layer, head, row.position / C_), place = row.position % C_;
    for (int64_t d = 0; d < D_; ++d) keys_[page + d * C_ + place] = key[d];
    std::copy_n(value, D_, values_ + page + place * D_);
  }

  // Attends from the queries that share a head of keys and values. What is past the row's position is not read.
  void attend(const Row& row, int64_t layer, int64_t head, float* queries, const float* weight, float* to) {
    const int64_t group = Q_ / KV_, seen = row.position + 1, num_pages = (seen + C_ - 1) / C_, room = num_pages * C_;
    const float shrink = 1.0f / std::sqrt(static_cast<float>(D_));
    const int64_t size = of_queries_ / (Q_ / D_);  // of a head: its query, and its gate if there are gates
    queries += head * group * size;
    for (int64_t q = 0; q < group; ++q) {
      float* query = queries + q * size;
      if (weight != nullptr) normed(query, weight, D_, m_.eps, query);
      rotate(query, row.cos, row.sin, row.rotated);
      for (int64_t d = 0; d < D_; ++d) query[d] *= shrink;
    }
    std::vector<float>& scores = of_thread();
    scores.resize(group * room);
    for (int64_t page = 0; page < num_pages; ++page) {
      product({queries, size}, group, keys_ + page_of(row, layer, head, page), C_, D_, scores.data() + page * C_, room,
              C_);
    }
    to += head * group * D_;
    for (int64_t q = 0; q < group; ++q) softmax(scores.data() + q * room, seen, room);
    for (int64_t page = 0; page < num_pages; ++page) {
      product({scores.data() + page * C_, room}, group, values_ + page_of(row, layer, head, page), D_,
              std::min(C_, seen - page * C_), to, D_, D_, page > 0);
    }
    if (size == D_) return;
    for (int64_t q = 0; q < group; ++q) gate(to + q * D_, queries + q * size + D_, D_);
  }

  static void gate(float* attended, const float* gates, int64_t count) {
    for (int64_t i = 0; i < count; i += kLanes) {
      store(attended + i, load(attended + i, count - i) / (exp(-load(gates + i, count - i)) + 1.0f), count - i);
    }
  }

  // `room` is a multiple of kLanes.
  static void softmax(float* scores, int64_t seen, int64_t room) {
    std::fill(scores + seen, scores + room, -std::numeric_limits<float>::infinity());
    const float highest = *std::max_element(scores, scores + seen);
    Vec total{};
    for (int64_t i = 0; i < room; i += kLanes) {
      const Vec weight = exp(load(scores + i) - of(highest));
      store(scores + i, weight);
      total += weight;
    }
    const float scale = 1.0f / sum(total);
    for (int64_t i = 0; i < room; i += kLanes) store(scores + i, load(scores + i) * scale);
  }

  Team& team_;
  const Model& m_;
  const std::vector<Row> rows_;
  const std::vector<Run> runs_;
  const bool follow_;
  float *const keys_, *const values_;
  const int64_t pages_, J_, D_, C_, H_, Q_, KV_, of_queries_, I_, N_;
  std::vector<RowBlock> blocks_;
  std::vector<float> normed_;
  std::vector<Pair> packed_;  // what a product by bfloat16 reads
  std::vector<float> low_;
};

constexpr int64_t kBlock = 512;

// The first token whose running sum of weights exceeds `level`, in two steps: blocks, then tokens. Never one of weight
// 0.
int64_t search(const float* weights, int64_t size, float uniform) {
  const int64_t num_blocks = (size + kBlock - 1) / kBlock;
  std::vector<float> ends(num_blocks);
  float total = 0;
  for (int64_t block = 0; block < num_blocks; ++block) {
    Vec sums{};
    for (int64_t i = block * kBlock; i < std::min(size, (block + 1) * kBlock); i += kLanes) {
      sums += load(weights + i, size - i);
    }
    ends[block] = total += sum(sums);
  }
  const float level = uniform * total;
  const auto first_above = [](const float* sums, int64_t count, float wanted) {
    // Rounding may raise the level to the last sum, above which there is none: it is kept just below. NaN is above
    // none.
    wanted = std::clamp(wanted, 0.0f, std::nextafter(sums[count - 1], 0.0f));
    return std::min<int64_t>(std::upper_bound(sums, sums + count, wanted) - sums, count - 1);
  };
  const int64_t block = first_above(ends.data(), num_blocks, level);
  const int64_t begin = block * kBlock, count = std::min(kBlock, size - begin);
  std::array<float, kBlock> inside;
  std::partial_sum(weights + begin, weights + begin + count, inside.begin());
  return begin + first_above(inside.data(), count, level - (block > 0 ? ends[block - 1] : 0.0f));
}

// Draws a token from one row of logits, of which `scale` times is at least `floor`; the best one if `greedy`. `logp`
// gets the log-probabilities of the vocabulary.
int64_t draw(const float* logits, int64_t size, bool greedy, float scale, float floor, float uniform, float* logp,
             float* logprob) {
  thread_local std::vector<float> weights;
  const int64_t room = (size + kLanes - 1) / kLanes * kLanes;
  weights.assign(room, 0.0f);
  for (int64_t i = 0; i < size; i += kLanes) store(logp + i, load(logits + i, size - i) * scale, size - i);
  const float highest = *std::max_element(logp, logp + size);
  Vec total{};
  for (int64_t i = 0; i < size; i += kLanes) {
    Vec scaled = of(-std::numeric_limits<float>::infinity());
    std::memcpy(&scaled, logp + i, std::min<int64_t>(kLanes, size - i) * sizeof(float));
    const Vec weight = exp(scaled - of(highest));
    total += weight;
    store(weights.data() + i, scaled >= of(floor) ? weight : Vec{});
  }
  const float normalizer = highest + std::log(sum(total));
  for (int64_t i = 0; i < size; ++i) logp[i] -= normalizer;
  const int64_t token =
      greedy ? std::max_element(logits, logits + size) - logits : search(weights.data(), size, uniform);
  *logprob = logp[token];
  return token;
}

}  // namespace

// Leaves its results as they come. Memory of which nobody has ever touched a page takes none of the machine's.
void untouched(Call& call) { call.results.skip(call.results.left()); }

void sampling_layers(Call& call) {
  Arrays& given = call.arguments;
  const Floats x = given.floats();
  const Ints positions = given.ints(), tables = given.ints(), adapters = given.ints(), rank = given.ints();
  const Floats scale = given.floats(), cos = given.floats(), sin = given.floats();
  Model model{};
  model.rank = rank.data, model.scale = scale.data, model.eps = call.eps, model.rounds = call.rounds;
  for (Floats* norm : {&model.input_norm, &model.q_norm, &model.k_norm, &model.post_norm, &model.final_norm}) {
    *norm = given.floats();
  }
  const std::array<Matrix*, 4> matrices{&model.qkv, &model.o, &model.gate_up, &model.down};
  for (Matrix* matrix : matrices) matrix->array = given.any();
  model.head = given.any();
  for (int module = kQ; module <= kHead; ++module) {
    const Floats A = given.floats();
    model.lora.emplace_back(A, given.floats());
  }
  model.recurs = call.recurs;
  Ints states{};
  if (model.recurs) {
    model.is_recurrent = given.ints(), states = given.ints();
    model.delta_in.array = given.any(), model.delta_o.array = given.any();
    for (int module = kDeltaMixed; module <= kDeltaO; ++module) {
      const Floats A = given.floats();
      model.lora.emplace_back(A, given.floats());
    }
    Recurrence& rule = model.recurrence;
    rule.convolution = given.floats(), rule.decay = given.floats(), rule.step = given.floats();
    rule.norm = given.floats(), rule.eps = call.eps;
  }
  given.skip(model.recurs ? 4 : 2);  // keys and values, states and tails, which become results
  const Floats keys = call.results.floats(), values = call.results.floats();
  if (model.recurs) model.recurrence.states = call.results.floats(), model.recurrence.tails = call.results.floats();
  const Floats out = call.results.floats();
  const int64_t every = x.dims[0], H = x.dims[1], half = cos.dims[1];
  const int64_t of_table = every / tables.dims[0], G = tables.dims[1];
  std::vector<Row> rows;
  for (int64_t n = 0; n < every; ++n) {
    const int32_t position = positions.data[n];
    if (position < 0) continue;
    const int64_t tile = n / of_table;
    rows.push_back({n, position, tile, tables.data + tile * G, adapters.data[tile], cos.data + n * half,
                    sin.data + n * half, 2 * half});
  }
  std::stable_sort(rows.begin(), rows.end(), [](const Row& a, const Row& b) { return a.adapter < b.adapter; });
  std::vector<float> hidden(rows.size() * H);
  for (size_t n = 0; n < rows.size(); ++n) std::copy_n(x.data + rows[n].number * H, H, hidden.data() + n * H);
  std::vector<Run> runs;
  for (size_t n = 0; model.recurs && n < rows.size(); ++n) {
    if (n == 0 || rows[n].tile != rows[n - 1].tile) {
      const int32_t* of_run = states.data + 2 * rows[n].tile;
      runs.push_back({static_cast<int64_t>(n), 0, of_run[0], of_run[1]});
    }
    ++runs.back().count;
  }
  Team team(call.threads);
  Pass pass(team, model, rows, runs, of_table > 1, keys.data, values.data, keys.dims);
  pass.layers(hidden.data());
  if (call.gives_logits) {
    pass.logits(hidden.data(), out.data);
  } else {
    std::fill_n(out.data, out.count(), 0.0f);
    for (size_t n = 0; n < rows.size(); ++n) {
      std::copy_n(hidden.data() + n * H, H, out.data + rows[n].number * H);
    }
  }
}

void draw(Call& call) {
  const Floats logits = call.arguments.floats();
  const Ints count = call.arguments.ints();
  const Floats temperature = call.arguments.floats(), scale = call.arguments.floats();
  const Floats floor = call.arguments.floats(), uniform = call.arguments.floats();
  const Ints tokens = call.results.ints();
  const Floats logprobs = call.results.floats(), logp = call.results.floats();
  const int64_t every = logits.dims[0], V = logits.dims[1];
  std::fill_n(tokens.data, every, 0);
  std::fill_n(logprobs.data, every, 0.0f);
  Team team(call.threads);
  team.each(count.data[0], [&](int64_t n) {
    tokens.data[n] = static_cast<int32_t>(draw(logits.data + n * V, V, temperature.data[n] <= 0, scale.data[n],
                                               floor.data[n], uniform.data[n], logp.data + n * V, logprobs.data + n));
  });
}

}  // namespace tinsmith

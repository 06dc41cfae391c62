// One step of AdamW for one adapter, as optimizer.py documents it: whatever is said there of padding and of modules
// that are not trained holds here.
//
// An adapter is a pair of factors A [..., inputs, r], B [..., r, outputs] of each of eight modules. A number's bits
// depend neither on its place nor on the number of threads: squares are summed in pieces of one size, which are added
// in order.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "call.h"
#include "team.h"
#include "vectors.h"

namespace tinsmith {
namespace {

constexpr int kAttention = 4, kMlp = 7, kModules = 8;  // where those modules end; the last is the output head
constexpr int64_t kPiece = 1 << 14;
constexpr int64_t kWorthAThread = 1 << 18;  // numbers; waking a thread takes as long as these

// In the order of optimizer.Hyper.
struct Hyper {
  float decay, step_size, beta1, rest1, beta2, rest2, root_correction, eps, clip, rank, attention, mlp, head;

  bool trains(int module) const { return (module < kAttention ? attention : module < kMlp ? mlp : head) > 0; }
};

struct Factor {
  const float *weights, *m, *v, *gradients;
  float *new_weights, *new_m, *new_v;
};

// A part of a factor. Which of its numbers are trained repeats: number i is if `trained`[i % period] is not 0.
struct Piece {
  const Factor* factor;
  int64_t first, count;
  const float* trained;
  int64_t period;
};

Vec sqrt(Vec x) {
  float lanes[kLanes];
  store(lanes, x);
  for (float& lane : lanes) lane = std::sqrt(lane);
  return load(lanes);
}

// Calls each(i, left, trained) for every kLanes numbers of a piece.
template <typename Each>
void for_lanes(const Piece& piece, Each each) {
  for (int64_t i = 0, at = 0; i < piece.count; i += kLanes) {
    each(piece.first + i, piece.count - i, load(piece.trained + at));
    at += kLanes;
    if (at == piece.period) at = 0;
  }
}

float square_sum(const Piece& piece) {
  Vec total{};
  for_lanes(piece, [&, g = piece.factor->gradients](int64_t i, int64_t left, Vec trained) {
    const Vec gradient = trained != 0 ? load(g + i, left) : Vec{};
    total += gradient * gradient;
  });
  return sum(total);
}

void step(const Piece& piece, const Hyper& h, float factor) {
  const Factor f = *piece.factor;
  for_lanes(piece, [&](int64_t i, int64_t left, Vec trained) {
    const Vec weight = load(f.weights + i, left);
    const Vec g = trained != 0 ? load(f.gradients + i, left) * factor : Vec{};
    const Vec m = h.beta1 * load(f.m + i, left) + h.rest1 * g;
    const Vec v = h.beta2 * load(f.v + i, left) + h.rest2 * (g * g);
    const Vec moved = weight * h.decay - h.step_size * (m / (sqrt(v) / h.root_correction + h.eps));
    store(f.new_weights + i, trained != 0 ? moved : weight, left);
    store(f.new_m + i, m, left);
    store(f.new_v + i, v, left);
  });
}

class Pieces {
 public:
  Pieces(int64_t padded_rank, int64_t rank)
      : period_(padded_rank * kLanes), columns_(period_), all_(kLanes, 1.0f), none_(kLanes, 0.0f) {
    for (int64_t i = 0; i < period_; ++i) columns_[i] = i % padded_rank < rank ? 1.0f : 0.0f;
  }

  // Each row of A has a number for each rank, padding last.
  void add_A(const Factor& factor, int64_t count, bool trains) { cut(factor, 0, count, trains ? columns_ : none_); }
  // Each B has a row for each rank, padding last.
  void add_B(const Factor& factor, int64_t count, int64_t size, int64_t used, bool trains) {
    for (int64_t first = 0; first < count; first += size) {
      cut(factor, first, first + used, trains ? all_ : none_);
      cut(factor, first + used, first + size, none_);
    }
  }
  const std::vector<Piece>& all() const { return pieces_; }
  int64_t count() const { return count_; }

 private:
  void cut(const Factor& factor, int64_t first, int64_t end, const std::vector<float>& trained) {
    const int64_t period = trained.size(), most = (kPiece + period - 1) / period * period;
    count_ += end - first;
    for (; first < end; first += most) {
      pieces_.push_back({&factor, first, std::min(most, end - first), trained.data(), period});
    }
  }

  int64_t period_;
  std::vector<float> columns_, all_, none_;
  std::vector<Piece> pieces_;
  int64_t count_ = 0;
};

}  // namespace

void adamw_step(Call& call) {
  Hyper h;
  std::memcpy(&h, call.arguments.floats().data, sizeof(h));
  std::vector<Factor> factors(2 * kModules);
  std::vector<Floats> shapes;
  for (Factor& factor : factors) {
    shapes.push_back(call.arguments.floats());
    factor.weights = shapes.back().data;
  }
  for (Factor& factor : factors) factor.m = call.arguments.floats().data;
  for (Factor& factor : factors) factor.v = call.arguments.floats().data;
  for (Factor& factor : factors) factor.gradients = call.arguments.floats().data;
  for (Factor& factor : factors) factor.new_weights = call.results.floats().data;
  for (Factor& factor : factors) factor.new_m = call.results.floats().data;
  for (Factor& factor : factors) factor.new_v = call.results.floats().data;
  float* norm = call.results.floats().data;

  const int64_t rank = static_cast<int64_t>(h.rank);
  Pieces pieces(shapes[0].dims[-1], rank);
  for (int module = 0; module < kModules; ++module) {
    const Floats &A = shapes[2 * module], &B = shapes[2 * module + 1];
    const int64_t columns = B.dims[-1];
    pieces.add_A(factors[2 * module], A.count(), h.trains(module));
    pieces.add_B(factors[2 * module + 1], B.count(), B.dims[-2] * columns, rank * columns, h.trains(module));
  }
  const std::vector<Piece>& all = pieces.all();
  const int64_t number = all.size();
  std::vector<float> squares(number);
  Threads threads = call.threads;
  threads.count = std::min(threads.count, 1 + pieces.count() / kWorthAThread);
  Team team(threads);
  team.each(number, [&](int64_t at) { squares[at] = square_sum(all[at]); });
  double total = 0;
  for (const float part : squares) total += part;
  *norm = static_cast<float>(std::sqrt(total));
  const float shrink = h.clip / (*norm + 1e-6f);  // torch.nn.utils.clip_grad_norm_; not a number if the norm is not
  const float factor = h.clip > 0 && !(shrink >= 1) ? shrink : 1.0f;
  team.each(number, [&](int64_t at) { step(all[at], h, factor); });
}

}  // namespace tinsmith

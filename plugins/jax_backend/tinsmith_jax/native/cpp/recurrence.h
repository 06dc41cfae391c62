// Layers that mix tokens by the gated delta rule, after a short convolution. gated_delta.py documents both, and computes
// the same.
//
// M = layers with the rule, S = rows of states, C = channels of the convolution, w = its width, H = value heads, J = key
// heads, dk and dv = sizes of their heads.

#ifndef TINSMITH_RECURRENCE_H_
#define TINSMITH_RECURRENCE_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "call.h"
#include "vectors.h"

namespace tinsmith {

// Tokens of one sequence that follow each other, as rows that do so, and the rows of states before and after them.
struct Run {
  int64_t first, count;
  int32_t from;  // below 0: the sequence begins
  int32_t to;
};

class Recurrence {
 public:
  Floats convolution;        // [M, w, C]
  Floats decay, step, norm;  // [M, H], [M, H], [M, dv]
  Floats states, tails;      // [M, S, H, dk, dv], [M, S, w - 1, C]
  float eps;                 // of the norm

  int64_t heads() const { return states.dims[2]; }
  int64_t channels() const { return tails.dims[3]; }
  int64_t values() const { return heads() * states.dims[4]; }
  // Of a layer's projection: what is convolved, the gate, and of each head beta and the decay's input.
  int64_t projected() const { return channels() + values() + 2 * heads(); }

  // Convolves some channels of a run, and applies SiLU: `to` is [rows, C]. The last inputs are kept for the next run.
  void convolve(int64_t layer, const Run& run, const float* projections, int64_t first, int64_t count, float* to) const {
    const int64_t C = channels(), reach = tails.dims[2];
    const float* weights = convolution.data + layer * (reach + 1) * C + first;
    std::vector<float> inputs((reach + run.count) * count, 0.0f);
    if (run.from >= 0) {
      const float* before = tail(layer, run.from) + first;
      for (int64_t t = 0; t < reach; ++t) std::copy_n(before + t * C, count, inputs.data() + t * count);
    }
    for (int64_t t = 0; t < run.count; ++t) {
      std::copy_n(projections + (run.first + t) * projected() + first, count, inputs.data() + (reach + t) * count);
    }
    for (int64_t t = 0; t < run.count; ++t) {
      float* out = to + (run.first + t) * C + first;
      for (int64_t i = 0; i < count; i += kLanes) {
        Vec total{};
        for (int64_t tap = 0; tap <= reach; ++tap) {
          total += load(inputs.data() + (t + tap) * count + i, count - i) * load(weights + tap * C + i, count - i);
        }
        store(out + i, silu(total), count - i);
      }
    }
    float* after = tail(layer, run.to) + first;
    for (int64_t t = 0; t < reach; ++t) std::copy_n(inputs.data() + (run.count + t) * count, count, after + t * C);
  }

  // Takes a run's tokens by one head, given what the convolution gave: its part of `to` [rows, values] is the rule's
  // output, normed and gated. The state is kept for the next run.
  void advance(int64_t layer, const Run& run, int64_t head, const float* projections, const float* convolved,
               float* to) const {
    const int64_t dk = states.dims[3], dv = states.dims[4], H = heads(), C = channels(), V = values();
    const int64_t keys = (C - V) / 2, of_key = head / (H * dk / keys) * dk;
    const float log_rate = decay.data[layer * H + head], offset = step.data[layer * H + head];
    const float shrink = 1.0f / std::sqrt(static_cast<float>(dk));
    float* const own = state(layer, run.to, head);
    const float* before = run.from < 0 ? nullptr : state(layer, run.from, head);
    std::vector<float> scratch(2 * dk + 2 * dv);
    float *const q = scratch.data(), *const k = q + dk, *const found = k + dk, *const out = found + dv;
    for (int64_t row = run.first; row < run.first + run.count; ++row) {
      const float* mixed = convolved + row * C;
      const float* projection = projections + row * projected() + C;
      const float *gate = projection + head * dv, *v = mixed + 2 * keys + head * dv;
      of_length_1(mixed + of_key, dk, shrink, q);
      of_length_1(mixed + keys + of_key, dk, 1.0f, k);
      const float beta = 1.0f / (1.0f + std::exp(-projection[V + head])), input = projection[V + H + head] + offset;
      const float rate = std::max(input, 0.0f) + std::log1p(std::exp(-std::abs(input)));
      const float left = std::exp(-std::exp(log_rate) * rate);
      std::fill_n(found, dv, 0.0f);
      for (int64_t i = 0; i < dk; ++i) {
        for (int64_t j = 0; j < dv; j += kLanes) {
          const Vec part = before == nullptr ? Vec{} : load(before + i * dv + j, dv - j) * left;
          store(own + i * dv + j, part, dv - j);
          store(found + j, load(found + j, dv - j) + part * k[i], dv - j);
        }
      }
      for (int64_t j = 0; j < dv; ++j) found[j] = (v[j] - found[j]) * beta;
      std::fill_n(out, dv, 0.0f);
      for (int64_t i = 0; i < dk; ++i) {
        for (int64_t j = 0; j < dv; j += kLanes) {
          const Vec part = load(own + i * dv + j, dv - j) + load(found + j, dv - j) * k[i];
          store(own + i * dv + j, part, dv - j);
          store(out + j, load(out + j, dv - j) + part * q[i], dv - j);
        }
      }
      float* of_row = to + row * V + head * dv;
      normed(out, norm.data + layer * dv, dv, eps, of_row);
      for (int64_t j = 0; j < dv; j += kLanes) {
        store(of_row + j, load(of_row + j, dv - j) * silu(load(gate + j, dv - j)), dv - j);
      }
      before = own;
    }
  }

 private:
  static Vec silu(Vec x) { return x / (exp(-x) + 1.0f); }

  static void of_length_1(const float* x, int64_t size, float times, float* to) {
    Vec squares{};
    for (int64_t i = 0; i < size; i += kLanes) {
      const Vec part = load(x + i, size - i);
      squares += part * part;
    }
    const float scale = 1.0f / std::sqrt(sum(squares) + 1e-6f) * times;
    for (int64_t i = 0; i < size; ++i) to[i] = x[i] * scale;
  }

  float* state(int64_t layer, int64_t row, int64_t head) const {
    return states.data + ((layer * states.dims[1] + row) * heads() + head) * states.dims[3] * states.dims[4];
  }
  float* tail(int64_t layer, int64_t row) const {
    return tails.data + (layer * tails.dims[1] + row) * tails.dims[2] * channels();
  }
};

}  // namespace tinsmith

#endif  // TINSMITH_RECURRENCE_H_

// A call by a program of XLA, as the kernels see it. xla.cc makes one of XLA's own form.
//
// The kernels are compiled when a server first starts, and its first client waits for them. So what they include is
// little: <functional>, <memory>, <string> and <thread> take as long as a small kernel.

#ifndef TINSMITH_CALL_H_
#define TINSMITH_CALL_H_

#include <cstdint>

namespace tinsmith {

enum class Type { kFloat32, kBFloat16, kInt32, kOther };

// The sizes of an array. Those before 0 count from the last.
struct Dims {
  const int64_t* first = nullptr;
  int64_t size = 0;

  int64_t operator[](int64_t index) const { return first[index < 0 ? size + index : index]; }
};

template <typename T>
struct ArrayOf {
  T* data = nullptr;
  Dims dims;

  int64_t count() const {
    int64_t product = 1;
    for (int64_t i = 0; i < dims.size; ++i) product *= dims[i];
    return product;
  }
};
using Floats = ArrayOf<float>;
using Ints = ArrayOf<int32_t>;

struct Array : ArrayOf<void> {
  Type type = Type::kOther;
};

// Thrown for a call that no kernel can compute. `array` is the one at fault, if one is.
struct Refused {
  const char* why;
  int64_t array = -1;
};

// The arguments or the results of a call, which are taken in order. Throws Refused if there are no more, or if the next
// one has another type.
class Arrays {
 public:
  Arrays(const Array* first, int64_t size) : first_(first), size_(size) {}

  Array any() {
    if (left() == 0) throw Refused{"too few arrays"};
    return first_[taken_++];
  }
  Floats floats() { return typed<float>(Type::kFloat32); }
  Ints ints() { return typed<int32_t>(Type::kInt32); }
  void skip(int64_t count) {
    for (int64_t i = 0; i < count; ++i) any();
  }
  int64_t left() const { return size_ - taken_; }

 private:
  template <typename T>
  ArrayOf<T> typed(Type type) {
    const Array found = any();
    if (found.type != type) throw Refused{"a wrong type", taken_ - 1};
    return {static_cast<T*>(found.data), found.dims};
  }

  const Array* first_;
  int64_t size_, taken_ = 0;
};

// XLA's threads. `schedule` has one of them call work(argument), some time. Returns whether one will.
struct Threads {
  int64_t count;
  void* pool;
  bool (*schedule)(void* pool, void (*work)(void*), void* argument);
};

struct Call {
  Threads threads;
  Arrays arguments, results;
  float eps = 0;              // of RMSNorm
  bool gives_logits = false;  // rather than hidden states
  bool rounds = false;        // to bfloat16, what matrices of the model multiply, which must be of that type
  bool recurs = false;        // some layers mix tokens by a recurrence
  int32_t adapters = 0;       // that come one by one
};

using Kernel = void(Call&);
Kernel untouched, sampling_layers, draw;     // sampling.cc
Kernel training_forward, training_backward;  // training.cc
Kernel head_forward, head_backward;          // head.cc
Kernel adamw_step;                           // optimizer.cc

}  // namespace tinsmith

#endif  // TINSMITH_CALL_H_

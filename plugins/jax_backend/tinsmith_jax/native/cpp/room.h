// Memory for intermediate results.

#ifndef TINSMITH_ROOM_H_
#define TINSMITH_ROOM_H_

#include <array>
#include <cstdint>
#include <vector>

#include "vectors.h"

namespace tinsmith {

// Numbers that nobody has set yet: filling them with zeros would take as long as some of the steps of a layer.
template <typename T>
class RoomOf {
 public:
  explicit RoomOf(int64_t size) : numbers_(new T[size]) {}
  ~RoomOf() { delete[] numbers_; }
  RoomOf(const RoomOf&) = delete;
  RoomOf& operator=(const RoomOf&) = delete;
  T* data() { return numbers_; }
  const T* data() const { return numbers_; }

 private:
  T* numbers_;
};
using Room = RoomOf<float>;

// Floats of this thread, which stay until it asks for the same ones again.
inline float* scratch(int which, int64_t size) {
  thread_local std::array<std::vector<float>, 7> all;
  std::vector<float>& floats = all[which];
  if (static_cast<int64_t>(floats.size()) < size) floats.resize(size);
  return floats.data();
}

// Pairs of this thread, likewise.
inline Pair* pair_scratch(int64_t size) {
  thread_local std::vector<Pair> pairs;
  if (static_cast<int64_t>(pairs.size()) < size) pairs.resize(size);
  return pairs.data();
}

}  // namespace tinsmith

#endif  // TINSMITH_ROOM_H_

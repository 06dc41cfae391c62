// A loop whose steps are shared between the calling thread and threads of XLA's pool.

#ifndef TINSMITH_TEAM_H_
#define TINSMITH_TEAM_H_

#include <sched.h>

#include <atomic>
#include <cstdint>
#include <new>

#include "call.h"

namespace tinsmith {

// Shares the steps of one loop after the other. The caller takes part, and goes on without threads that come late: the
// pool may be busy with something else. Helpers stay from the first loop to the last, because waking them takes longer
// than most loops.
class Team {
 public:
  explicit Team(const Threads& threads) : work_(new Work) {
    const auto help = [](void* work) { static_cast<Work*>(work)->help(); };
    for (int64_t helper = 1; helper < threads.count; ++helper) {
      work_->owners.fetch_add(1, std::memory_order_relaxed);
      if (!threads.schedule(threads.pool, help, work_)) work_->leave();
    }
  }
  ~Team() {
    work_->ticket.store(kClosed, std::memory_order_release);
    work_->leave();
  }
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  // Calls step(0) to step(count - 1), in any order and by any thread. Returns when all are done, or throws
  // std::bad_alloc if any of them lacked memory.
  template <typename Step>
  void each(int64_t count, Step step) {
    if (count <= 0) return;
    work_->step = [](void* context, int64_t index) { (*static_cast<Step*>(context))(index); };
    work_->context = &step;
    work_->left.store(count, std::memory_order_relaxed);
    loop_ = (loop_ + 1) & kLoops;
    work_->ticket.store(loop_ << 48 | static_cast<uint64_t>(count) << 24, std::memory_order_release);
    work_->take_steps();
    for (int spins = 0; work_->left.load(std::memory_order_acquire) > 0; ++spins) pause(spins);
    if (work_->lacked_memory.load(std::memory_order_relaxed)) throw std::bad_alloc();
  }

 private:
  static constexpr uint64_t kLoops = 0x7fff, kSteps = 0xffffff, kClosed = ~uint64_t{0};

  static void pause(int spins) {
    if (spins < 2000) {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    } else {
      sched_yield();
    }
  }

  // Lives until the caller and all helpers have left.
  struct Work {
    std::atomic<int64_t> owners{1};
    // Number of the loop (15 bits), of its steps (24), and of the next step (24): one word, so that a thread that was
    // held up cannot take a step of another loop than it believes.
    std::atomic<uint64_t> ticket{0};
    std::atomic<int64_t> left{0};
    std::atomic<bool> lacked_memory{false};
    void (*step)(void*, int64_t) = nullptr;
    void* context = nullptr;

    void take_steps() {
      for (;;) {
        const uint64_t seen = ticket.load(std::memory_order_acquire);
        if (seen == kClosed || (seen & kSteps) >= (seen >> 24 & kSteps)) return;
        uint64_t expected = seen;
        if (!ticket.compare_exchange_weak(expected, seen + 1, std::memory_order_acq_rel)) continue;
        try {
          step(context, static_cast<int64_t>(seen & kSteps));
        } catch (const std::bad_alloc&) {
          lacked_memory.store(true, std::memory_order_relaxed);
        }
        left.fetch_sub(1, std::memory_order_release);
      }
    }

    void help() {
      for (int spins = 0; ticket.load(std::memory_order_acquire) != kClosed; ++spins) {
        const uint64_t seen = ticket.load(std::memory_order_acquire);
        if (seen != kClosed && (seen & kSteps) < (seen >> 24 & kSteps)) {
          take_steps();
          spins = 0;
        }
        pause(spins);
      }
      leave();
    }

    void leave() {
      if (owners.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
    }
  };

  Work* work_;
  uint64_t loop_ = 0;
};

}  // namespace tinsmith

#endif  // TINSMITH_TEAM_H_

// The threads of PyTorch, as the calls of run.h use them.
#pragma once

#include <torch/csrc/stable/c/shim.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <new>
#include <utility>
#include <vector>

namespace fastattn {
namespace {

inline int64_t num_threads() {
  uint32_t threads = 1;
  torch_get_num_threads(&threads);
  return threads;
}

// Calls run(begin, end) for ranges that make up 0, ..., n - 1, of `grain` or more each, in several threads. Throws
// std::bad_alloc where one of them did. It does not pass through PyTorch, whose C++ library may be another one than
// that of this module, as it is in the wheels: there it ended the process.
template <class Run>
void parallel_for(int64_t n, int64_t grain, const Run& run) {
  struct Call {
    const Run& run;
    std::atomic<bool> lacks_memory{false};
  } shared{run};
  const auto call = [](int64_t begin, int64_t end, void* shared) {
    Call& of_all = *static_cast<Call*>(shared);
    try {
      of_all.run(begin, end);
    } catch (const std::bad_alloc&) {
      of_all.lacks_memory = true;
    }
  };
  if (torch_parallel_for(0, n, grain, call, &shared) || shared.lacks_memory) throw std::bad_alloc();
}

// Uninitialised floats that begin at a cache line.
class Memory {
 public:
  explicit Memory(int64_t floats) : floats_(floats) {
    if (floats > 0) data_.reset(static_cast<float*>(::operator new(floats * sizeof(float), kLine)));
  }
  float* data() const { return data_.get(); }
  int64_t floats() const { return floats_; }

 private:
  static constexpr std::align_val_t kLine{64};
  struct Delete {
    void operator()(float* data) const { ::operator delete(data, kLine); }
  };
  std::unique_ptr<float, Delete> data_;
  int64_t floats_;
};

// The memory of a call. A thread keeps that of a small call for its next one: each 4096 bytes that went back to the
// system would cost a page fault again.
class Scratch {
 public:
  explicit Scratch(int64_t floats) {
    if (kept_.floats() >= floats) std::swap(memory_, kept_);
    if (memory_.floats() < floats) memory_ = Memory(floats);
  }
  ~Scratch() {
    if (memory_.floats() <= kMostKept && memory_.floats() > kept_.floats()) std::swap(memory_, kept_);
  }

  float* of_thread(int64_t thread, int64_t floats) const { return memory_.data() + thread * floats; }

 private:
  static constexpr int64_t kMostKept = 1 << 18;
  static inline thread_local Memory kept_{0};
  Memory memory_{0};
};

// for_each of csrc/cpu/run.h: a thread takes another i whenever it begins one, since items differ in length.
template <class Run>
void take_in_turn(int64_t n, int64_t scratch_floats, const Run& run) {
  const int64_t threads = std::min(num_threads(), n);
  const Scratch scratch(threads * scratch_floats);  // rows begin at cache lines, see Arena
  std::atomic<int64_t> next{0};
  parallel_for(threads, 1, [&](int64_t thread, int64_t) {
    float* const own = scratch.of_thread(thread, scratch_floats);
    for (int64_t i = next.fetch_add(1), after; i < n; i = after) {
      after = next.fetch_add(1);
      run(i, after, own);
    }
  });
}
constexpr auto in_turn = [](int64_t n, int64_t scratch_floats, auto run) { take_in_turn(n, scratch_floats, run); };

// The same for items that are worth little more than the memory they read: each thread has a share of them that follow
// each other, as PyTorch cuts what it writes, so that a cache that was just written is read by the cores that have it.
// Whoever is done helps the others.
template <class Run>
void take_shares(int64_t n, int64_t scratch_floats, const Run& run) {
  const int64_t threads = std::min(num_threads(), n);
  const Scratch scratch(threads * scratch_floats);
  std::vector<std::atomic<int64_t>> next(threads);
  for (int64_t share = 0; share < threads; ++share) next[share] = share * n / threads;
  parallel_for(threads, 1, [&](int64_t thread, int64_t) {
    float* const own = scratch.of_thread(thread, scratch_floats);
    for (int64_t turn = 0; turn < threads; ++turn) {
      const int64_t share = (thread + turn) % threads, end = (share + 1) * n / threads;
      for (int64_t i = next[share].fetch_add(1), after; i < end; i = after) {
        after = next[share].fetch_add(1);
        run(i, after < end ? after : n, own);
      }
    }
  });
}
constexpr auto in_shares = [](int64_t n, int64_t scratch_floats, auto run) { take_shares(n, scratch_floats, run); };

}  // namespace
}  // namespace fastattn

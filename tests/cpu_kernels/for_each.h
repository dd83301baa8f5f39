// The items of a call (csrc/cpu/run.h): one thread takes them in turn, and several where ThreadSanitizer watches.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "guarded.h"

namespace fastattn::test {

#if defined(__SANITIZE_THREAD__)
constexpr int64_t kRealThreads = 8;
#else
constexpr int64_t kRealThreads = 1;
#endif

// A for_each of run.h. In its scratch an item finds nothing of the one before. Which thread takes an item is settled
// before: a counter that all threads take from would order their memory, and ThreadSanitizer would see no race.
class ForEach {
 public:
  explicit ForEach(Placement placement) : placement_(placement) {}

  template <class Run>
  void operator()(int64_t n, int64_t scratch_floats, Run run) {
    const auto take = [&](int64_t first) {
      constexpr int64_t kCacheLine = 64;
      std::unique_ptr<Buffer> scratch;
      for (int64_t i = first; i < n; i += kRealThreads) {
        if (scratch && placement_ != Placement::heap) {  // guarded memory takes long to get
          std::memset(scratch->data(), Buffer::kUntouched, scratch->size());
        } else {
          scratch = std::make_unique<Buffer>(placement_, scratch_floats * int64_t(sizeof(float)), kCacheLine);
        }
        run(i, i + kRealThreads, scratch->data<float>());
        if (!scratch->surroundings_untouched()) kept_inside_ = false;
      }
    };
    std::vector<std::thread> others;
    for (int64_t thread = 1; thread < std::min(kRealThreads, n); ++thread) others.emplace_back(take, thread);
    take(0);
    for (std::thread& other : others) other.join();
  }

  // Whether no item has written beside its scratch.
  bool kept_inside() const { return kept_inside_; }

 private:
  Placement placement_;
  std::atomic<bool> kept_inside_ = true;
};

}  // namespace fastattn::test

// The items of a call (csrc/cpu/run.h), which one thread takes in turn.
#pragma once

#include <cstdint>

#include "guarded.h"

namespace fastattn::test {

// A for_each of run.h. Every item has a scratch of its own, where nothing of the one before is left.
class Sequential {
 public:
  explicit Sequential(Placement placement) : placement_(placement) {}

  template <class Run>
  void operator()(int64_t n, int64_t scratch_floats, Run run) {
    constexpr int64_t kCacheLine = 64;
    for (int64_t i = 0; i < n; ++i) {
      const Buffer scratch(placement_, scratch_floats * int64_t(sizeof(float)), kCacheLine);
      run(i, i + 1, scratch.data<float>());
      kept_inside_ = kept_inside_ && scratch.surroundings_untouched();
    }
  }

  // Whether no item has written beside its scratch.
  bool kept_inside() const { return kept_inside_; }

 private:
  Placement placement_;
  bool kept_inside_ = true;
};

}  // namespace fastattn::test

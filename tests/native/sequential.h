// A call of the kernels, cut into items as for `threads` threads, which one thread then takes in turn.
#pragma once

#include <vector>

#include "../../csrc/cpu/schedule.h"
#include "guarded.h"

namespace fastattn::test {

// Every item has a scratch of its own, where nothing of the one before is left. Returns whether all kept inside it.
template <class Item, class Run>
bool each_item(Placement placement, const std::vector<Item>& items, int64_t scratch_floats, Run run) {
  constexpr int64_t kCacheLine = 64;
  bool kept_inside = true;
  for (const Item& item : items) {
    const Buffer scratch(placement, scratch_floats * int64_t(sizeof(float)), kCacheLine);
    run(item, scratch.data<float>());
    kept_inside = kept_inside && scratch.surroundings_untouched();
  }
  return kept_inside;
}

inline bool run_forward(const Kernels& kernels, const Problem& p, const ForwardOutputs& out, int64_t threads,
                        Placement placement) {
  return each_item(placement, forward_items(p, kernels, threads), kernels.forward_scratch(p),
                   [&](const ForwardItem& item, float* scratch) { kernels.forward(p, out, item, scratch); });
}

// t.dq.data may be null, and so may t.dk.data with t.dv.data: they are not wanted then.
inline bool run_backward(const Kernels& kernels, const Problem& p, const BackwardTensors& t, int64_t threads,
                         Placement placement) {
  return each_item(placement, backward_items(p, kernels, t.dq.data, t.dk.data, threads), kernels.backward_scratch(p),
                   [&](const BackwardItem& item, float* scratch) { kernels.backward(p, t, item, scratch); });
}

}  // namespace fastattn::test

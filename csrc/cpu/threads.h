// The threads of PyTorch, as the calls of run.h use them.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

namespace fastattn {
namespace {

using at::Tensor;

// for_each of csrc/cpu/run.h: a thread takes another i whenever it begins one, since items differ in length.
template <class Run>
void take_in_turn(int64_t n, int64_t scratch_floats, Run run) {
  const int64_t threads = std::min<int64_t>(at::get_num_threads(), n);
  const Tensor scratch = at::empty({threads, scratch_floats}, at::kFloat);  // rows begin at cache lines, see Arena
  std::atomic<int64_t> next{0};
  at::parallel_for(0, threads, 1, [&](int64_t thread, int64_t) {
    float* own = scratch.data_ptr<float>() + thread * scratch_floats;
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
void take_shares(int64_t n, int64_t scratch_floats, Run run) {
  const int64_t threads = std::min<int64_t>(at::get_num_threads(), n);
  const Tensor scratch = at::empty({threads, scratch_floats}, at::kFloat);
  std::vector<std::atomic<int64_t>> next(threads);
  for (int64_t share = 0; share < threads; ++share) next[share] = share * n / threads;
  at::parallel_for(0, threads, 1, [&](int64_t thread, int64_t) {
    float* own = scratch.data_ptr<float>() + thread * scratch_floats;
    for (int64_t turn = 0; turn < threads; ++turn) {
      const int64_t share = (thread + turn) % threads, end = (share + 1) * n / threads;
      for (int64_t i; (i = next[share].fetch_add(1)) < end;) run(i, n, own);
    }
  });
}
constexpr auto in_shares = [](int64_t n, int64_t scratch_floats, auto run) { take_shares(n, scratch_floats, run); };

}  // namespace
}  // namespace fastattn

// launch() of csrc/cuda/launch.cuh in the model: the blocks of a grid are shared out over the threads of the operating
// system.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <numeric>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "multiprocessor.h"
#include "settings.h"

namespace fastattn::cuda {

namespace model {

// Runs all blocks and throws the first mistake.
inline void run(const Grid& grid) {
  std::vector<int64_t> order(grid.blocks);
  std::iota(order.begin(), order.end(), 0);
  Random random(settings.seed);
  in_order(order.begin(), order.end(), settings.order, random);
  std::atomic<int64_t> next = 0;
  std::mutex lock;
  std::exception_ptr mistake;
  const auto run_some = [&] {
    Counters counted;
    std::exception_ptr own;
    try {
      Multiprocessor here(grid);
      for (int64_t i; (i = next++) < grid.blocks;) here.run_block(order[i]);
      counted = here.counters;
    } catch (...) {
      own = std::current_exception();
      next = grid.blocks;
    }
    const std::lock_guard guard(lock);
    counters += counted;
    if (!mistake) mistake = own;
  };
  {
    std::vector<std::jthread> others;
    const int64_t processors = std::max<int64_t>(std::thread::hardware_concurrency(), 1);
    for (int64_t i = 1; i < std::min(processors, grid.blocks); ++i) others.emplace_back(run_some);
    run_some();
  }
  if (mistake) std::rethrow_exception(mistake);
}

}  // namespace model

template <class... P>
cudaError_t launch(void (*kernel)(P...), int64_t blocks, int threads, int shared_bytes, cudaStream_t,
                   const std::type_identity_t<P>&... arguments) {
  constexpr int64_t kMostBlocks = 0x7fffffff;
  if (blocks == 0) return cudaSuccess;
  if (shared_bytes > model::settings.shared_bytes) return cudaErrorInvalidValue;
  if (blocks < 0 || blocks > kMostBlocks || threads < 1 || threads > model::kMostThreads)
    return cudaErrorInvalidConfiguration;
  if (threads % model::kLanes != 0)
    throw model::Mistake("a block must be whole warps, got " + std::to_string(threads) + " threads");
  model::run({blocks, threads, shared_bytes, [&] { kernel(arguments...); }});
  return cudaSuccess;
}

}  // namespace fastattn::cuda

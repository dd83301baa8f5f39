// How a kernel is launched.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace fastattn::cuda {

template <class T>
struct Given {
  using type = T;  // the parameter's own type, which the argument is converted to
};

// Runs kernel(arguments...) in `blocks` blocks of `threads` threads, each block with `shared_bytes` of shared_memory().
// Returns what was wrong with the launch, not what goes wrong in the kernel.
template <class... P>
cudaError_t launch(void (*kernel)(P...), int64_t blocks, int threads, int shared_bytes, cudaStream_t stream,
                   const typename Given<P>::type&... arguments) {
  constexpr int64_t kMostBlocks = 0x7fffffff;
  constexpr int kSharedBytesForAll = 48 * 1024;  // a kernel must ask for more
  if (blocks == 0) return cudaSuccess;
  if (blocks < 0 || blocks > kMostBlocks) return cudaErrorInvalidConfiguration;
  if (shared_bytes > kSharedBytesForAll &&
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes) != cudaSuccess) {
    return cudaGetLastError();
  }
  kernel<<<static_cast<unsigned>(blocks), threads, shared_bytes, stream>>>(arguments...);
  return cudaGetLastError();
}

}  // namespace fastattn::cuda

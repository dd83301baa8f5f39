// CUDA's runtime library, as far as what nvcc compiles for the host calls it: each launch goes to a function in Python,
// which cuda.py sets. The GPU is one of which a block may have so much shared memory.
#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#define FASTATTN_VISIBLE extern "C" __attribute__((visibility("default")))

namespace {

struct Kernel {
  int module;  // each source with kernels is one
  const char* name;
  int allowed;  // bytes of dynamic shared memory, of which more than these must be asked for
};
constexpr int kSharedBytesForAll = 48 * 1024;

using OnLaunch = bool (*)(int module, const char* kernel, const dim3* grid, const dim3* block, size_t shared,
                          void* const* arguments, const uint64_t* ranges, size_t n_ranges);
OnLaunch on_launch = nullptr;
int most_shared = 0;

// Functions, since nvcc's code registers kernels before this file's variables are made.
std::map<const void*, Kernel>& kernels() {  // by the host's function of the same name
  static std::map<const void*, Kernel> all;
  return all;
}
std::vector<void*>& modules() {
  static std::vector<void*> all;
  return all;
}
struct Call {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
} call;  // that is being prepared
cudaError_t last_error = cudaSuccess;

cudaError_t remembered(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

cudaError_t launched(const void* function, dim3 grid, dim3 block, void** arguments, size_t shared) {
  const Kernel& kernel = kernels().at(function);
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return remembered(cudaErrorInvalidConfiguration);
  if (block.y != 1 || block.z != 1 || block.x == 0 || block.x > 1024) return remembered(cudaErrorInvalidConfiguration);
  if (shared > size_t(kernel.allowed)) return remembered(cudaErrorInvalidValue);
  const auto& ranges = c10::cuda::allocated;
  const bool fine =
      on_launch(kernel.module, kernel.name, &grid, &block, shared, arguments, ranges.data(), ranges.size());
  return remembered(fine ? cudaSuccess : cudaErrorLaunchFailure);
}

}  // namespace

FASTATTN_VISIBLE void fastattn_set_gpu(OnLaunch function, int shared_bytes) {
  on_launch = function, most_shared = shared_bytes;
  for (auto& [_, kernel] : kernels()) kernel.allowed = std::min(kSharedBytesForAll, shared_bytes);
  last_error = cudaSuccess;
}
// The name of kernel i, and the number of its module; null past the last one.
FASTATTN_VISIBLE const char* fastattn_kernel(size_t i, int* module) {
  if (i >= kernels().size()) return nullptr;
  const Kernel& kernel = std::next(kernels().begin(), ptrdiff_t(i))->second;
  *module = kernel.module;
  return kernel.name;
}

extern "C" {

void** __cudaRegisterFatBinary(void* binary) {
  modules().push_back(binary);
  return reinterpret_cast<void**>(modules().size() - 1);
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void** module, const char* function, char*, const char* name, int, uint3*, uint3*, dim3*,
                            dim3*, int*) {
  kernels()[function] = {int(reinterpret_cast<uintptr_t>(module)), name, kSharedBytesForAll};
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  call = {grid, block, shared, stream};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = call.grid, *block = call.block, *shared = call.shared, *static_cast<cudaStream_t*>(stream) = call.stream;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(const void** kernel, const void* function) {
  *kernel = function;
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void** arguments, size_t shared,
                               cudaStream_t) {
  return launched(kernel, grid, block, arguments, shared);
}
// As nvcc before 12.8 calls it.
cudaError_t cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void** arguments, size_t shared, cudaStream_t) {
  return launched(kernel, grid, block, arguments, shared);
}

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value > most_shared)
    return remembered(cudaErrorInvalidValue);
  kernels().at(kernel).allowed = value;
  return cudaSuccess;
}
cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }

}  // extern "C"

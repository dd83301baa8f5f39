// Prints each launch of the CUDA kernels: the kernel's name and the bytes of shared memory that the host gives it. It is
// linked with the kernels and, in place of CUDA's runtime library, with these functions, which launch nothing: the memory
// of the calls is nowhere.
#include <cstdio>
#include <initializer_list>
#include <map>

#include "../csrc/cuda/kernels.h"

namespace {

std::map<const void*, const char*> names;  // of the host's functions
size_t shared_bytes;                       // of the launch that is being prepared

cudaError_t print_launch(const void* kernel) {
  std::printf("%s %zu\n", names.at(kernel), shared_bytes);
  return cudaSuccess;
}

}  // namespace

extern "C" {

void** __cudaRegisterFatBinary(void*) { return nullptr; }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char* host_function, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*,
                            int*) {
  names[host_function] = name;
}

unsigned __cudaPushCallConfiguration(dim3, dim3, size_t bytes, cudaStream_t) {
  shared_bytes = bytes;
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t* bytes, void*) {
  *bytes = shared_bytes;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(const void** kernel, const void* host_function) {
  *kernel = host_function;
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(const void* kernel, dim3, dim3, void**, size_t, cudaStream_t) { return print_launch(kernel); }
// As nvcc before 12.8 calls it.
cudaError_t cudaLaunchKernel(const void* kernel, dim3, dim3, void**, size_t, cudaStream_t) { return print_launch(kernel); }

cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }

}  // extern "C"

namespace fastattn::cuda {

Problem problem_of(DType dtype, int head_dim, bool general) {
  static char somewhere;
  Problem p{};
  p.B = p.H = p.H_kv = 1;
  p.d_qk = p.d_v = head_dim;
  p.dtype = dtype;
  p.queries.n = p.keys.n = kQueryPadding;
  p.queries.groups = p.keys.groups = reinterpret_cast<Tokens*>(&somewhere);
  p.softcap = general ? 1 : 0;
  p.q.data = p.k.data = p.v.data = &somewhere;
  return p;
}

// Every kernel there is.
void launch_all() {
  for (DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    for (int head_dim : {64, 128, kMostColumns}) {
      for (bool general : {false, true}) {
        const Problem p = problem_of(dtype, head_dim, general);
        Backward gradients{p};
        gradients.dq = gradients.dk = gradients.dv = p.q;
        gradients.d_bias = static_cast<float*>(p.q.data);
        gradients.bias_B = gradients.bias_H = 1;
        with_kernels_of(dtype, [&](auto kernels) {
          kernels.forward(Forward{p}, nullptr);
          return kernels.backward(gradients, nullptr);
        });
      }
    }
  }
}

}  // namespace fastattn::cuda

int main() { fastattn::cuda::launch_all(); }

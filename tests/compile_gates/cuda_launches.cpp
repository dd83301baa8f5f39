// Prints each launch of the CUDA kernels: the kernel's name and the bytes of shared memory that the host gives it.
// Fails where a GPU would refuse one, or the host does not tell what was refused. It is linked with the kernels and, in
// place of CUDA's runtime library, with these functions, which launch nothing: the memory of the calls is nowhere.
#include <cstdio>
#include <cstring>
#include <initializer_list>
#include <map>

#include "../../csrc/cuda/kernels.h"

namespace {

constexpr size_t kSharedBytesForAll = 48 * 1024;

std::map<const void*, const char*> names;     // of the host's functions
std::map<const void*, size_t> allowed_bytes;  // of shared memory, where they were asked for
dim3 grid;                                    // of the launch that is being prepared
size_t shared_bytes;
cudaError_t last_error = cudaSuccess;  // until it is asked for
int launches = 0, wrong = 0;

void expect(bool holds, const char* what) {
  if (holds) return;
  std::printf("wrong: %s\n", what);
  ++wrong;
}

cudaError_t print_launch(const void* kernel) {
  ++launches;
  expect(grid.x > 0, "a launch of no blocks");
  expect(shared_bytes <= kSharedBytesForAll || shared_bytes <= allowed_bytes[kernel],
         "a launch with more shared memory than was asked for");
  const char* name = names.at(kernel);
  expect(shared_bytes > 0 || !std::strstr(name, "Tiling"), "a launch without memory for tiles");
  std::printf("%s %zu\n", name, shared_bytes);
  return last_error;
}

}  // namespace

extern "C" {

void** __cudaRegisterFatBinary(void*) { return nullptr; }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char* host_function, char*, const char* name, int, uint3*, uint3*, dim3*,
                            dim3*, int*) {
  names[host_function] = name;
}

unsigned __cudaPushCallConfiguration(dim3 blocks, dim3, size_t bytes, cudaStream_t) {
  grid = blocks;
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
cudaError_t __cudaLaunchKernel(const void* kernel, dim3, dim3, void**, size_t, cudaStream_t) {
  return print_launch(kernel);
}
// As nvcc before 12.8 calls it.
cudaError_t cudaLaunchKernel(const void* kernel, dim3, dim3, void**, size_t, cudaStream_t) {
  return print_launch(kernel);
}

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize && last_error == cudaSuccess)
    allowed_bytes[kernel] = value;
  return last_error;
}
cudaError_t cudaGetLastError() { return last_error; }

}  // extern "C"

namespace fastattn::cuda {

Params params_of(DType dtype, int head_dim, bool general) {
  static char somewhere;
  Params p{};
  p.B = p.H = p.H_kv = 1;
  p.d_qk = p.d_v = head_dim;
  p.dtype = dtype;
  p.queries.n = p.keys.n = kLargestTile;
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
        const Params p = params_of(dtype, head_dim, general);
        BackwardParams gradients{p};
        gradients.dq = gradients.dk = gradients.dv = p.q;
        gradients.d_bias = static_cast<float*>(p.q.data);
        gradients.bias_B = gradients.bias_H = 1;
        with_kernels_of(dtype, [&](auto kernels) {
          ForwardParams f{p};
          expect(kernels.forward(f, nullptr) == cudaSuccess, "a forward that can be launched");
          static int table;
          f.paged_k.table = f.paged_v.table = &table;
          expect(kernels.forward(f, nullptr) == cudaSuccess, "a forward of pages that can be launched");
          f.params.queries.n = 1;
          f.parts = {2, kLargestTile};
          expect(kernels.forward(f, nullptr) == cudaSuccess, "a forward of few queries that can be launched");
          expect(kernels.backward(gradients, nullptr) == cudaSuccess, "a backward that can be launched");
          return cudaSuccess;
        });
      }
    }
  }
}

// What the host must not launch, or not go on after.
void refuse_some() {
  const auto forward = [](const Params& p) {
    launches = 0;
    return Kernels<f16>::forward(ForwardParams{p}, nullptr);
  };
  Params none = params_of(DType::f16, 64, false);
  none.queries.n = 0;
  none.queries.groups = none.keys.groups = nullptr;
  expect(forward(none) == cudaSuccess && launches == 0, "no queries must be no launch");
  Params many = params_of(DType::f16, 64, false);
  many.B = 1 << 20, many.H = 1 << 12;
  many.queries.groups = many.keys.groups = nullptr;
  expect(forward(many) == cudaErrorInvalidConfiguration && launches == 0, "too many blocks must be refused");
  last_error = cudaErrorLaunchOutOfResources;
  expect(forward(params_of(DType::f16, 64, false)) == last_error && launches == 1, "an error of a launch must be told");
  last_error = cudaSuccess;
}

}  // namespace fastattn::cuda

int main() {
  fastattn::cuda::launch_all();
  fastattn::cuda::refuse_some();
  return wrong > 0;
}

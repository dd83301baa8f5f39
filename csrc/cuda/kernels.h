// Whole calls, as the host makes them: torch-free. Each returns what was wrong with a launch.
#pragma once

#include <cuda_runtime_api.h>

#include "../dtype.h"
#include "elements.h"
#include "problem.h"

namespace fastattn::cuda {

// `groups` of both sides and `facts` are memory that the caller lends. d_qk and d_v are at most kMostColumns.
constexpr int kMostColumns = 256;

// Of one dtype: each is compiled in a file of its own.
template <class Element>
struct Kernels {
  static cudaError_t forward(const Forward& call, cudaStream_t stream);
  static cudaError_t backward(const Backward& call, cudaStream_t stream);
};

// Calls run(Kernels) with those for that dtype.
template <class Run>
cudaError_t with_kernels_of(DType dtype, Run run) {
  return dtype == DType::f32 ? run(Kernels<float>()) : dtype == DType::bf16 ? run(Kernels<bf16>()) : run(Kernels<f16>());
}

}  // namespace fastattn::cuda

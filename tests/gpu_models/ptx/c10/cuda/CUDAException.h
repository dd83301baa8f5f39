// How the binding reports what was wrong with a launch.
#pragma once

#include <c10/util/Exception.h>
#include <cuda_runtime_api.h>

#define C10_CUDA_CHECK(call)                                       \
  do {                                                             \
    const cudaError_t error = (call);                              \
    TORCH_CHECK(error == cudaSuccess, "CUDA error: ", int(error)); \
  } while (false)

// The little that csrc/cuda/kernels.h wants of CUDA's own header of this name.
#pragma once

using cudaStream_t = struct CUstream_st*;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorInvalidConfiguration = 9 };

// Marks the functions that the C++ compiler and nvcc compile alike.
#pragma once

#if defined(__CUDACC__)
#define FASTATTN_HD __host__ __device__ inline
#else
#define FASTATTN_HD inline
#endif

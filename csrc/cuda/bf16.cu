// The kernels for bfloat16.
#include "kernels.cuh"

template struct fastattn::cuda::Kernels<fastattn::cuda::bf16>;

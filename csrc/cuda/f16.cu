// The kernels for float16.
#include "kernels.cuh"

template struct fastattn::cuda::Kernels<fastattn::cuda::f16>;

#include "kernels.cuh"

template struct fastattn::cuda::Kernels<fastattn::cuda::f16>;

#include "kernels.cuh"

template struct fastattn::cuda::Kernels<float>;

// The kernels for float32.
#include "kernels.cuh"

template struct fastattn::cuda::Kernels<float>;

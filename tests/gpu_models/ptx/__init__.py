"""A machine that executes PTX: compiled kernels of the GPU backends on the CPU, under the launches of the backends."""

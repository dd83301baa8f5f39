// bf16 by the matrix products of NEON.
#if defined(__aarch64__)

#include <arm_neon.h>

#include <type_traits>
#include <utility>

#include "../softmax.h"
#include "params.h"

#define FASTATTN_TARGET "arch=armv8.2-a+bf16"
#define FASTATTN_ISA neon_bf16
#define FASTATTN_BF16 1
#define FASTATTN_LANES 4
#define FASTATTN_ACCUMULATORS 16
#define FASTATTN_COLUMNS 2
#define FASTATTN_BLOCK_KEYS 96
#define FASTATTN_CHUNK_BLOCKS 8
#define FASTATTN_SINGLE_BLOCK_KEYS 0
#include "kernels.h"

#endif

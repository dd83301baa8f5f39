// NEON: 4 lanes, 32 registers.
#if defined(__aarch64__)

#include <arm_neon.h>

#include <type_traits>
#include <utility>

#include "../softmax.h"
#include "params.h"

#define FASTATTN_ISA neon
#define FASTATTN_LANES 4
#define FASTATTN_ACCUMULATORS 20
#define FASTATTN_COLUMNS 4
#define FASTATTN_BLOCK_KEYS 96
#define FASTATTN_CHUNK_BLOCKS 1
#define FASTATTN_SINGLE_BLOCK_KEYS 128
#include "kernels.h"

#endif

// 4 lanes: SSE2, or whatever every machine of the architecture has; neon.cpp is that of Arm.
#if !defined(__aarch64__)

#include <type_traits>
#include <utility>

#include "../softmax.h"
#include "params.h"

#define FASTATTN_ISA portable
#define FASTATTN_LANES 4
#define FASTATTN_ACCUMULATORS 12
#define FASTATTN_COLUMNS 2
#define FASTATTN_BLOCK_KEYS 96
#define FASTATTN_CHUNK_BLOCKS 1
#define FASTATTN_SINGLE_BLOCK_KEYS 128
#include "kernels.h"

#endif

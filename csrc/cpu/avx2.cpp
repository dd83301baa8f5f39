// 8 lanes, 16 registers.
#if defined(__x86_64__)

#include <immintrin.h>

#include <type_traits>
#include <utility>

#include "../softmax.h"
#include "params.h"

#define FASTATTN_TARGET "avx2,fma,f16c"
#define FASTATTN_ISA avx2
#define FASTATTN_LANES 8
#define FASTATTN_ACCUMULATORS 12
#define FASTATTN_COLUMNS 2
#define FASTATTN_BLOCK_KEYS 96
#define FASTATTN_CHUNK_BLOCKS 1
#define FASTATTN_SINGLE_BLOCK_KEYS 128
#include "kernels.h"

#endif

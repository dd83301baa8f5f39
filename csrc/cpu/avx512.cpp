// 16 lanes, 32 registers.
#if defined(__x86_64__)

#include <immintrin.h>

#include <type_traits>
#include <utility>

#include "../softmax.h"
#include "params.h"

#define FASTATTN_TARGET "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"
#define FASTATTN_ISA avx512
#define FASTATTN_LANES 16
#define FASTATTN_ACCUMULATORS 24
#define FASTATTN_COLUMNS 4
#define FASTATTN_BLOCK_KEYS 48
#define FASTATTN_CHUNK_BLOCKS 1
#define FASTATTN_SINGLE_BLOCK_KEYS 128
#include "kernels.h"

#endif

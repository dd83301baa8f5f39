// bf16 by the matrix products of AMX, with AVX-512 for the rest.
#if defined(__x86_64__)

#include <immintrin.h>

#include <type_traits>
#include <utility>

#include "../softmax.h"
#include "params.h"

#define FASTATTN_TARGET "avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"
#define FASTATTN_ISA amx
#define FASTATTN_BF16 1
#define FASTATTN_TILES 1
#define FASTATTN_LANES 16
#define FASTATTN_ACCUMULATORS 24
#define FASTATTN_COLUMNS 4
#define FASTATTN_BLOCK_KEYS 128
#define FASTATTN_CHUNK_BLOCKS 16
#define FASTATTN_SINGLE_BLOCK_KEYS 0
#include "kernels.h"

#endif

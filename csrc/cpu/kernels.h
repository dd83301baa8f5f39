// Everything that is compiled once per instruction set. The includer says which, before a `#pragma GCC target`:
//
//   FASTATTN_ISA                its name, also the namespace
//   FASTATTN_LANES              floats in a vector
//   FASTATTN_BF16               1: products of bf16 (arith_bf16.h) instead of fp32 (arith_fp32.h); no other dtype then
//   FASTATTN_TILES              1: products by AMX (tiles.h) instead of vectors (product.h)
//   FASTATTN_ACCUMULATORS       vectors of sums that a product keeps in registers
//   FASTATTN_COLUMNS            vectors of queries in a block
//   FASTATTN_BLOCK_KEYS         keys in a block
//   FASTATTN_CHUNK_BLOCKS       blocks of keys that are prepared together
//   FASTATTN_SINGLE_BLOCK_KEYS  the most keys of an isolated run that are a single block (short_kv.h)
//
// and includes before it whatever these headers include besides each other, so that inline functions, of which the
// linker keeps one copy for the whole module, are compiled for any machine (tests/compile_gates/test_headers.py checks
// it).
#pragma once

#include "backward.h"
#include "blocks.h"
#include "forward.h"
#include "params.h"
#include "peak_fma.h"
#include "weights.h"
#if !FASTATTN_BF16
#include "decode.h"
#include "short_kv.h"
#endif

#define FASTATTN_STRING(x) #x
#define FASTATTN_NAME(x) FASTATTN_STRING(x)

namespace fastattn::FASTATTN_ISA {

extern const Kernels kernels;
const Kernels kernels = {
    FASTATTN_NAME(FASTATTN_ISA),
    kBlockQueries,
    kStripQueries,
    kBlockKeys,
    forward_scratch,
    forward,
    backward_scratch,
    backward,
    fma_chains,
    kChainOperations,
    &weights_kernels,
#if FASTATTN_BF16
    nullptr,
#else
    &decode_kernels,
#endif
};

}  // namespace fastattn::FASTATTN_ISA

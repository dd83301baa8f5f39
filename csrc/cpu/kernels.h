// Everything that is compiled once per instruction set. The includer says which:
//
//   FASTATTN_TARGET             what the compiler may use, by its names; not defined: what every machine has
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

#define FASTATTN_STRING(...) #__VA_ARGS__
#define FASTATTN_TEXT(...) FASTATTN_STRING(__VA_ARGS__)
#define FASTATTN_PRAGMA(...) _Pragma(FASTATTN_TEXT(__VA_ARGS__))

#if defined(FASTATTN_TARGET) && defined(__clang__)
FASTATTN_PRAGMA(clang attribute push(__attribute__((target(FASTATTN_TARGET))), apply_to = function))
#elif defined(FASTATTN_TARGET)
FASTATTN_PRAGMA(GCC target(FASTATTN_TARGET))
#endif

#include "backward.h"
#include "blocks.h"
#include "decode.h"
#include "forward.h"
#include "params.h"
#include "peak_fma.h"
#include "weights.h"
#if !FASTATTN_BF16
#include "short_kv.h"
#endif

namespace fastattn::FASTATTN_ISA {

extern const Kernels kernels;
const Kernels kernels = {
    FASTATTN_TEXT(FASTATTN_ISA),
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
    &decode_kernels,
};

}  // namespace fastattn::FASTATTN_ISA

#if defined(FASTATTN_TARGET) && defined(__clang__)
#pragma clang attribute pop
#endif

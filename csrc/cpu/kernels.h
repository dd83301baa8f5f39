// Everything that is compiled once per instruction set. The includer says which, before a `#pragma GCC target`:
//
//   FASTATTN_ISA       its name, also the namespace       FASTATTN_LANES          floats in a vector
//   FASTATTN_SCORE_ROWS, _VALUE_ROWS, _OUTER_ROWS, _OUTER_COLUMNS   the tiles of the micro-kernel, in registers
//
// and includes "problem.h" and "../softmax.h" before it too, so that their inline functions, of which the linker keeps
// one copy for the whole module, are compiled for any machine.

namespace fastattn::FASTATTN_ISA {
namespace {

constexpr int kColumns = FASTATTN_COLUMNS;
constexpr int kScoreRows = FASTATTN_SCORE_ROWS;
constexpr int kValueRows = FASTATTN_VALUE_ROWS;
constexpr int kOuterRows = FASTATTN_OUTER_ROWS;
constexpr int kOuterColumns = FASTATTN_OUTER_COLUMNS;

}  // namespace
}  // namespace fastattn::FASTATTN_ISA

#include "vector.h"
#include "rows.h"
#include "matrix.h"
#if FASTATTN_PAIRS
#include "pairs.h"
#else
#include "single.h"
#endif
#if FASTATTN_TILES
#include "tiles.h"
#else
#include "product.h"
#endif
#include "blocks.h"
#include "dropout.h"
#include "bias.h"
#include "forward.h"
#include "backward.h"
#if !FASTATTN_PAIRS
#include "decode.h"
#endif
#include "ceiling.h"

#define FASTATTN_STRING(x) #x
#define FASTATTN_NAME(x) FASTATTN_STRING(x)

namespace fastattn::FASTATTN_ISA {

extern const Kernels kernels;
const Kernels kernels = {
    FASTATTN_NAME(FASTATTN_ISA),
    kColumns * kLanes,
    kStripBlocks * kColumns * kLanes,
    kBlockKeys,
    forward_scratch,
    forward,
    backward_scratch,
    backward,
    fma_chains,
    kChainOperations,
#if FASTATTN_PAIRS
    nullptr, nullptr, nullptr, nullptr,
#else
    decode_parts,
    decode_scratch,
    decode,
    combine,
#endif
};

}  // namespace fastattn::FASTATTN_ISA

// The micro-kernel on vectors: a tile of rows of scalars times vectors, in registers.
#pragma once

#include <cstdint>

#include "arith.h"
#include "matrix.h"
#include "vector.h"

namespace fastattn::FASTATTN_ISA {
namespace {

// acc = a * b. The accumulators fill the registers, and each element is one chain in the order of the steps, so the
// result does not depend on how a matrix is cut into tiles.
template <int R, int C, class Left, class RightSide>
FASTATTN_INLINE void vector_product(int64_t steps, Left a, RightSide b, Floats (&acc)[R][C]) {
  each_vector(acc, [](Floats& x, int, int) { x = Floats{}; });
  for (int64_t k = 0; k < steps; ++k) {
    if constexpr (R == 1) {  // a vector is needed once: none waits in a register
      const Floats scalar = splat(a(0, k));
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) acc[0][c] = multiply_add(scalar, b(k, c), acc[0][c]);
      continue;
    }
    Floats row[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) row[c] = b(k, c);
#pragma GCC unroll 32
    for (int r = 0; r < R; ++r) {
      const Floats scalar = splat(a(r, k));
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) acc[r][c] = multiply_add(scalar, row[c], acc[r][c]);
    }
  }
}

// Rows of a tile with C vectors of columns: as many as its accumulators leave registers for.
template <int C>
constexpr int kTileRows = FASTATTN_ACCUMULATORS / C < 12 ? FASTATTN_ACCUMULATORS / C : 12;

}  // namespace
}  // namespace fastattn::FASTATTN_ISA

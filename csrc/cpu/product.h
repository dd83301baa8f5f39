// The one micro-kernel. Every product of attention is a tile of rows of scalars times vectors.
#pragma once

#include <cstdint>

#include "../mask.h"
#include "arith.h"
#include "matrix.h"
#include "vector.h"
#include "vector_product.h"

namespace fastattn::FASTATTN_ISA {
namespace {

struct MultiplierInUse {};  // vectors need not be switched on

#if FASTATTN_BF16 && defined(__aarch64__)

// acc = a * b. bfmmla multiplies two rows by two columns, over two steps.
template <int R, int C, class RightSide>
FASTATTN_INLINE void product(int64_t steps, Rows a, RightSide b, Floats (&acc)[R][C]) {
  static_assert(R % 2 == 0);
  const auto multiply_add = [](Floats& sum, Floats rows, Floats columns) {
    sum = (Floats)vbfmmlaq_f32((float32x4_t)sum, (bfloat16x8_t)rows, (bfloat16x8_t)columns);
  };
  Floats of_columns[2][R / 2][C] = {};  // the first and the last two columns of each vector
  for (int64_t k = 0; k < steps; k += 2) {
    Floats columns[2][C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      const auto step = (float32x4_t)b(k, c), next = (float32x4_t)b(k + 1, c);
      columns[0][c] = (Floats)vzip1q_f32(step, next), columns[1][c] = (Floats)vzip2q_f32(step, next);
    }
#pragma GCC unroll 32
    for (int r = 0; r < R / 2; ++r) {
      const float *row = a.data + 2 * r * a.stride + k, *next_row = row + a.stride;
      const auto rows = (Floats)vcombine_f32(vld1_f32(row), vld1_f32(next_row));
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) {
        multiply_add(of_columns[0][r][c], rows, columns[0][c]);
        multiply_add(of_columns[1][r][c], rows, columns[1][c]);
      }
    }
  }
  each_vector(acc, [&](Floats& x, int r, int c) {
    const auto first = (float64x2_t)of_columns[0][r / 2][c], last = (float64x2_t)of_columns[1][r / 2][c];
    x = (Floats)(r % 2 == 0 ? vzip1q_f64(first, last) : vzip2q_f64(first, last));
  });
}

#else

template <int R, int C, class Left, class RightSide>
FASTATTN_INLINE void product(int64_t steps, Left a, RightSide b, Floats (&acc)[R][C]) {
  vector_product(steps, a, b, acc);
}

#endif

// Rows that share a unit once they are stored are computed together.
constexpr int64_t whole_units(int64_t rows) { return (rows + kPerUnit - 1) / kPerUnit * kPerUnit; }

// to += a * b for `rows` rows and C vectors of columns, in tiles of rows. It is summed from zero and then added, which
// halves the rounding error.
template <int C, class Left, class RightSide>
FASTATTN_ONCE void add_product(Target to, int64_t rows, int64_t steps, Left a, RightSide b) {
  each_tile<kTileRows<C>, kPerUnit>(0, whole_units(rows), [&](auto tile_rows, int64_t i) {
    Floats acc[decltype(tile_rows)::value][C];
    product(steps, a.at_row(i), b, acc);
    each_vector(acc, [&](Floats& x, int r, int c) { store(to.at(i + r, c), load(to.at(i + r, c)) + x); });
  });
}

// to = a * b for rows of C vectors that lie side by side. The steps go along the head dim.
template <int C, class Left>
FASTATTN_ONCE void assign_product(float* to, int64_t rows, int64_t steps, Left a, Right b) {
  each_tile<kTileRows<C>, kPerUnit>(0, whole_units(rows), [&](auto tile_rows, int64_t i) {
    Floats acc[decltype(tile_rows)::value][C];
    product(lesser(steps, kPartOfHeadDim), a.at_row(i), b, acc);
    each_vector(acc, [&](Floats& x, int r, int c) { store(to + ((i + r) * C + c) * kLanes, x); });
  });
  for (int64_t k = kPartOfHeadDim; k < steps; k += kPartOfHeadDim) {
    add_product<C>({to, C * kLanes}, rows, lesser(steps - k, kPartOfHeadDim), a.at_step(k), b.at_step(k));
  }
}

}  // namespace
}  // namespace fastattn::FASTATTN_ISA

// Matrices for the products, cut into tiles of rows and vectors of columns.
//
// They are made of 32-bit units: one float (arith_fp32.h), or two bf16 that follow each other in the direction of the
// sum (arith_bf16.h).
#pragma once

#include <cstdint>
#include <type_traits>

#include "rows.h"
#include "vector.h"

namespace fastattn::FASTATTN_ISA {
namespace {

// The factor on the left, taken unit by unit: row r at step k. Its rows lie in memory as such, or as columns.
struct Rows {
  const float* data;
  int64_t stride;

  FASTATTN_INLINE float operator()(int64_t r, int64_t k) const { return data[r * stride + k]; }
  Rows at_row(int64_t r) const { return {data + r * stride, stride}; }
  Rows at_step(int64_t k) const { return {data + k, stride}; }
};
struct Columns {
  const float* data;
  int64_t stride;

  FASTATTN_INLINE float operator()(int64_t r, int64_t k) const { return data[r + k * stride]; }
  Columns at_row(int64_t r) const { return {data + r, stride}; }
  Columns at_step(int64_t k) const { return {data + k * stride, stride}; }
};

// The factor on the right, taken by vectors of columns that lie side by side: vector c of step k. Elements other than
// floats are widened on the way.
template <class Element = float>
struct RightOf {
  const Element* data;
  int64_t stride;

  FASTATTN_INLINE Floats operator()(int64_t k, int64_t c) const { return widen(data + k * stride + c * kLanes); }
  RightOf at_step(int64_t k) const { return {data + k * stride, stride}; }
  RightOf at_column(int64_t column) const { return {data + column, stride}; }
};
using Right = RightOf<>;

// The same with C vectors in each step and nothing between them.
template <int C>
struct PackedRight {
  const float* data;

  FASTATTN_INLINE Floats operator()(int64_t k, int64_t c) const { return load(data + (k * C + c) * kLanes); }
  operator Right() const { return {data, C * kLanes}; }
};

// visit(x[r][c], r, c) for every vector of a tile, unrolled: the accumulators must never be indexed at run time.
template <int R, int C, class Visit>
FASTATTN_INLINE void each_vector(Floats (&x)[R][C], Visit visit) {
#pragma GCC unroll 32
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) visit(x[r][c], r, c);
  }
}

// Where a product goes, by vectors of columns.
struct Target {
  float* data;
  int64_t stride;

  FASTATTN_INLINE float* at(int64_t row, int vector) const { return data + row * stride + vector * kLanes; }
  Target at_row(int64_t row) const { return {data + row * stride, stride}; }
};

// Covers begin, ..., end - 1 by tiles of R, then by smaller ones, of a multiple of Grain, as `end` is:
// run(std::integral_constant<int, R>, first).
template <int R, int Grain = 1, class Run>
FASTATTN_INLINE void each_tile(int64_t begin, int64_t end, Run run) {
  for (; begin + R <= end; begin += R) run(std::integral_constant<int, R>{}, begin);
  constexpr int kSmaller = R == 12 || R == 6 ? 4 : R == 3 ? 2 : R / 2;
  if constexpr (kSmaller >= Grain) {
    if (begin < end) each_tile<kSmaller, Grain>(begin, end, run);
  }
}

constexpr int kColumns = FASTATTN_COLUMNS;  // vectors of queries in a block

// Vectors of columns of a matrix that is wider than a block of queries: as many as a block has are taken at a time.
template <class Run>
FASTATTN_INLINE void each_column_tile(int64_t columns, Run run) {
  each_tile<kColumns>(0, columns / kLanes, [&](auto vectors, int64_t first) { run(vectors, first * kLanes); });
}

// A sum over the head dim, which may be long, is cut into parts of so many units: the rounding errors of the parts do
// not all pile up in one chain.
constexpr int64_t kPartOfHeadDim = 64;

}  // namespace
}  // namespace fastattn::FASTATTN_ISA

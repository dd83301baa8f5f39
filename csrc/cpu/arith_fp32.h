// Arithmetic in fp32, whatever the dtype in memory: a unit is one float.
#pragma once

#include <cstdint>

#include "matrix.h"
#include "params.h"
#include "rows.h"
#include "vector.h"

namespace fastattn::FASTATTN_ISA {
namespace {

constexpr int kPerUnit = 1;        // elements in a unit
constexpr int kGrain = 1;          // keys are multiplied in multiples of this
constexpr int kFewestColumns = 1;  // vectors of queries

// Units of a row of d elements, up to whole vectors, and how many of them a sum over d has to take.
constexpr int64_t units(int64_t d) { return padded(d); }
constexpr int64_t steps_over(int64_t d) { return d; }

FASTATTN_INLINE Floats multiply_add(Floats x, Floats y, Floats sum) { return x * y + sum; }

// Rows i, ..., i + n - 1 of a list as units, zeros after the end of each.
FASTATTN_INLINE void read_units(const Input& x, int64_t b, int64_t h, const IndexList& list, int64_t i, int64_t n,
                                int64_t d, float* to) {
  read_rows(x, b, h, list, i, n, d, to);
}

// use(the first element of x), of any dtype; and a vector of units in memory.
template <class Use>
FASTATTN_INLINE void with_rows_of_units(const Input& x, Use use) {
  with_rows(x, use);
}
template <class Element>
FASTATTN_INLINE Floats load_units(const Element* p) {
  return widen(p);
}

// Whether the first n of a vector of units in memory can be read alone, and these, with zeros after them.
constexpr bool reads_some_units(DType dtype) { return kLanes == 16 && dtype != DType::i8; }
template <class Element>
FASTATTN_INLINE Floats load_some_units(const Element* p, int64_t n) {
  return widen_few(p, lesser(n, kLanes));
}

// Vector `c` of the right factor of a sum over rows, at step k of it: row(i, j) is vector j of row i, of units.
template <class Row>
FASTATTN_INLINE Floats across_rows(Row row, int64_t k, int64_t c) {
  return row(k, c);
}

// Units of a query, each element times on_query of ../softmax.h.
FASTATTN_INLINE Floats times_on_query(Floats units, float on_query) { return units * on_query; }

// Whether rows in memory are units already, and need no copy.
FASTATTN_INLINE bool are_units(const Input& x, int64_t) { return x.dtype == DType::f32; }

// The transpose of the rows of n keys: the left factor of a sum over the keys. `copy` has room for transposed_size.
using Transposed = Columns;
FASTATTN_INLINE Transposed transposed(Rows rows, int64_t, int64_t, float*) { return {rows.data, rows.stride}; }
constexpr int64_t transposed_size(int64_t, int64_t) { return 0; }

// The rows [M, units] of a block of queries as the right factor of a sum over the queries.
FASTATTN_INLINE Right over_queries(Rows rows, int64_t, int64_t, float*) { return {rows.data, rows.stride}; }
constexpr int64_t over_queries_size(int64_t, int64_t) { return 0; }
FASTATTN_INLINE int64_t query_steps(int64_t n, int64_t) { return n; }

// A matrix [keys, C vectors of queries] is the left factor of a sum over the queries, and the right factor of a sum
// over the keys: the same floats. x is row i of it, and the kPerUnit - 1 after it.
constexpr bool kOneForm = true;
using LeftElement = float;

template <int C>
FASTATTN_INLINE void store_right(float* to, int64_t i, const Floats (&x)[kPerUnit][C]) {
#pragma GCC unroll 8
  for (int c = 0; c < C; ++c) store(to + (i * C + c) * kLanes, x[0][c]);
}
template <int C>
FASTATTN_INLINE void store_left(float* to, int64_t i, const Floats (&x)[kPerUnit][C]) {
  store_right(to, i, x);
}

}  // namespace
}  // namespace fastattn::FASTATTN_ISA

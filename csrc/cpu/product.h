// The one micro-kernel. Every product of attention is a tile of rows of scalars times vectors.

namespace fastattn::FASTATTN_ISA {
namespace {

// visit(r, c) for every vector of a tile, unrolled: the accumulators must never be indexed at run time.
template <int R, int C, class Visit>
FASTATTN_INLINE void each_vector(Visit visit) {
#pragma GCC unroll 32
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) visit(r, c);
  }
}

// acc[r][c] = sum over k of a[r * a_row + k * a_step] * (vector c of row k of b).
//
// The accumulators fill the registers, and each element is one chain of FMAs in the order of k, so the result does not
// depend on how a matrix is cut into tiles.
template <int R, int C>
FASTATTN_INLINE void product(int64_t steps, const float* a, int64_t a_row, int64_t a_step, const float* b,
                             int64_t b_step, Floats (&acc)[R][C]) {
#pragma GCC unroll 32
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) acc[r][c] = Floats{};
  }
  for (int64_t k = 0; k < steps; ++k) {
    Floats row[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) row[c] = load(b + k * b_step + c * kLanes);
#pragma GCC unroll 32
    for (int r = 0; r < R; ++r) {
      const float scalar = a[r * a_row + k * a_step];
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) acc[r][c] += scalar * row[c];
    }
  }
}

// The same over a head dim, which may be long: summed in parts, whose rounding errors do not all pile up in one chain.
constexpr int64_t kPartOfHeadDim = 64;

template <int R, int C>
FASTATTN_INLINE void product_over_head_dim(int64_t dim, const float* a, int64_t a_row, const float* b, int64_t b_step,
                                           Floats (&acc)[R][C]) {
  product(lesser(dim, kPartOfHeadDim), a, a_row, 1, b, b_step, acc);
  for (int64_t d = kPartOfHeadDim; d < dim; d += kPartOfHeadDim) {
    Floats part[R][C];
    product(lesser(dim - d, kPartOfHeadDim), a + d, a_row, 1, b + d * b_step, b_step, part);
    each_vector<R, C>([&](int r, int c) { acc[r][c] += part[r][c]; });
  }
}

// Covers begin, ..., end - 1 by tiles of R, then of R/2, ..., 1: run(std::integral_constant<int, R>, first).
template <int R, class Run>
FASTATTN_INLINE void each_tile(int64_t begin, int64_t end, Run run) {
  for (; begin + R <= end; begin += R) run(std::integral_constant<int, R>{}, begin);
  if constexpr (R > 1) {
    if (begin < end) each_tile<R / 2>(begin, end, run);
  }
}

// x[n] += (row n of a^T) * y for the N rows of x: the gradient of keys or values from one block of queries.
// a is [N, steps], y [steps, columns], x [N, columns]; columns is a multiple of kLanes.
FASTATTN_INLINE void accumulate_rows(const float* a, int64_t a_row, int64_t n, int64_t steps, const float* y, float* x,
                                     int64_t columns) {
  each_tile<kOuterColumns>(0, columns / kLanes, [&](auto vectors, int64_t first_vector) {
    constexpr int C = decltype(vectors)::value;
    const int64_t column = first_vector * kLanes;
    each_tile<kOuterRows>(0, n, [&](auto rows, int64_t i) {
      constexpr int R = decltype(rows)::value;
      Floats acc[R][C];
      product(steps, a + i * a_row, a_row, 1, y + column, columns, acc);
      each_vector<R, C>([&](int r, int c) {
        float* at = x + (i + r) * columns + column + c * kLanes;
        store(at, load(at) + acc[r][c]);
      });
    });
  });
}

}  // namespace
}  // namespace fastattn::FASTATTN_ISA

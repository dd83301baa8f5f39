// Forward and backward as the host calls them, without torch. Each returns the error of a launch.
#pragma once

#include <cuda_runtime_api.h>

#include <utility>

#include "../dtype.h"
#include "elements.h"
#include "params.h"
#include "tiling.h"

namespace fastattn::cuda {

// The caller allocates `groups` of both sides, `stats`, and the rows of `parts`. d_qk and d_v are at most kMostColumns.
constexpr int kMostColumns = 256;

// How a call splits its keys, without the memory of the parts.
inline KeyParts parts_of(const Params& p) {
  KeyParts parts{1};
  if (p.queries.n > kFewQueries) return parts;
  const int64_t row_tiles = tiles_of(int64_t(p.queries.n) * p.group(), kRowsOfDecoding);
  parts.keys = clamp(kKeysOfPart * row_tiles, kLargestTile, greater(kLargestTile, padded(p.keys.n)));
  parts.count = greater(1, tiles_of(p.keys.n, parts.keys));
  return parts;
}

// The kernels of one dtype, which are compiled in a file of its own.
template <class Element>
struct Kernels {
  // Rows and columns of the tiles in which the gradient of a bias is computed, with head dims of at most so many.
  static constexpr std::pair<int, int> bias_tile(int columns) {
    const Shape shape = backward_shape(sizeof(Element), compiled_head_dim(columns), true, true);
    return {16 * shape.row_blocks * shape.warps, shape.columns};
  }

  static cudaError_t forward(const ForwardParams& f, cudaStream_t stream);
  static cudaError_t backward(const BackwardParams& g, cudaStream_t stream);
};

// Calls run with the Kernels of that dtype.
template <class Run>
auto with_kernels_of(DType dtype, Run run) {
  return dtype == DType::f32    ? run(Kernels<float>())
         : dtype == DType::bf16 ? run(Kernels<bf16>())
                                : run(Kernels<f16>());
}

}  // namespace fastattn::cuda

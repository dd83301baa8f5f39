// Tile sizes: every number that depends on the hardware.
#pragma once

#include <cstdint>

#include "fragments.h"

namespace fastattn::cuda {

// A block of `warps` warps takes 16 row_blocks rows each, and `columns` rows of the other side at a time.
struct Shape {
  int warps, row_blocks, columns;
};

// None was measured on a GPU yet. All were chosen by compiling, with nvcc 13.0: all fit into the 64 KB of shared memory
// that sm_75 has, and those of plain scores in 16 bits with head dims up to 128 spill no register on sm_80 and newer
// (`make cuda` prints what each kernel takes).
constexpr Shape forward_shape(int bytes, int head_dim, bool general) {
  if (bytes == 4) return head_dim == 64 ? Shape{4, 1, 32} : head_dim == 128 ? Shape{4, 1, 16} : Shape{2, 1, 8};
  // Where a warp has 32 rows it reads each key and value half as often: shared memory is as busy as the tensor cores.
  if (head_dim == 64) return general ? Shape{4, 1, 64} : Shape{4, 2, 64};
  if (head_dim == 128) return general ? Shape{4, 1, 64} : Shape{4, 2, 32};
  return {4, 1, 16};
}

// With few queries the heads that share keys share a tile of rows too, so that keys are read once, and the warps of a
// block share the columns of a tile.
constexpr int kFewQueries = 16, kRowsOfDecoding = 16;

constexpr Shape decoding_shape(int bytes, int head_dim) {
  if (bytes == 4) return head_dim == 64 ? Shape{4, 1, 64} : head_dim == 128 ? Shape{4, 1, 32} : Shape{2, 1, 16};
  return head_dim == 64 ? Shape{4, 1, 128} : head_dim == 128 ? Shape{4, 1, 64} : Shape{2, 1, 32};
}

// Keys of a part, for each tile of rows: so few that one query and 8 heads of keys have a block for each of the 132
// multiprocessors of an H100 from 4097 keys on, so many that what is written of a part is little beside them. It is the
// same for any number of samples and keys, on which the bits of a sample are not to depend.
constexpr int kKeysOfPart = 256;

// The gradients of queries, or of keys and values.
constexpr Shape backward_shape(int bytes, int head_dim, bool general, bool rows_are_queries) {
  if (bytes == 4) return head_dim == 64 ? Shape{4, 1, 16} : head_dim == 128 ? Shape{2, 1, 16} : Shape{1, 1, 8};
  if (head_dim == 64) return general ? Shape{4, 1, 32} : rows_are_queries ? Shape{4, 2, 32} : Shape{4, 1, 64};
  if (head_dim == 128) return {4, 1, general ? 16 : 32};
  return {2, 1, 16};
}

// The head dim that the kernels are compiled for which take rows of so many columns.
constexpr int compiled_head_dim(int columns) { return columns <= 64 ? 64 : columns <= 128 ? 128 : 256; }

// The tiles of a table of all pairs, of which those on a diagonal have the same distances from their queries to their
// keys. A tile of the next queries is on the diagonal `widths` further down.
struct Diagonals {
  int query_tiles, key_tiles, widths;

  constexpr int below() const { return query_tiles > 0 ? (query_tiles - 1) * widths : 0; }  // that of the first tile
  constexpr int count() const { return below() + key_tiles; }
};

template <class Element_, int kHeadDim_, int kWarps_, int kRowBlocks_, int kColumns_>
struct Tiling {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_, kWarps = kWarps_, kRowBlocks = kRowBlocks_, kColumns = kColumns_;
  static constexpr int kThreads = kWarp * kWarps, kRows = 16 * kRowBlocks * kWarps;
  static_assert(kRows % kColumns == 0);

  static constexpr Diagonals diagonals(int n_q, int n_k) {
    return {(n_q + kRows - 1) / kRows, (n_k + kColumns - 1) / kColumns, kRows / kColumns};
  }

  // Bytes of that many tiles of own rows, and of the other side's.
  static constexpr int shared_bytes(int of_rows, int of_columns) {
    return (of_rows * kRows + of_columns * kColumns) * kHeadDim * int(sizeof(Element));
  }
};

template <class Element_, int kHeadDim_, int kWarps_, int kColumns_>
struct DecodingTiling {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_, kWarps = kWarps_, kColumns = kColumns_;
  static constexpr int kThreads = kWarp * kWarps, kRows = kRowsOfDecoding, kColumnsOfWarp = kColumns / kWarps;

  // Of the queries, keys and values; then of what the warps have summed, which takes their place.
  static constexpr int kBytesOfTiles = (kRows + 2 * kColumns) * kHeadDim * int(sizeof(Element));
  static constexpr int kBytesOfSums = kWarps * kRows * (kHeadDim + 2) * int(sizeof(float));
  static constexpr int kSharedBytes = kBytesOfTiles > kBytesOfSums ? kBytesOfTiles : kBytesOfSums;
};

}  // namespace fastattn::cuda

// Rows of a head in shared memory.
#pragma once

#include "instructions.cuh"
#include "problem.h"

namespace fastattn::cuda {

FASTATTN_DEVICE int lane() { return threadIdx.x % kWarp; }
FASTATTN_DEVICE int warp() { return threadIdx.x / kWarp; }

// Rows of kColumns elements in chunks of 16 bytes. Chunk c of row r stands at place c ^ (r % 8) of its row, so that the
// same chunk of eight rows in a row, which the tensor cores want at a time, lies in different banks.
template <class Element_, int kColumns_>
struct SharedTile {
  using Element = Element_;
  static constexpr int kColumns = kColumns_;
  static constexpr int kInChunk = 16 / sizeof(Element);  // elements
  static constexpr int kChunks = kColumns / kInChunk;
  static_assert(kChunks % 8 == 0);

  Element* data;

  FASTATTN_DEVICE Element* chunk(int row, int i) const { return data + row * kColumns + (i ^ (row % 8)) * kInChunk; }
};

template <class Element, int kColumns>
constexpr int bytes_of_rows(int rows) {
  return rows * kColumns * int(sizeof(Element));
}

// Begins to copy the rows first, ..., first + kRows - 1 of a head, zeros for those that are not real, and for all columns
// from `columns` on. A thread copies the same chunk of rows that are so far apart that they have it at the same place.
template <int kRows, int kThreads, class Tile>
FASTATTN_DEVICE void copy_rows(Tile tile, const typename Tile::Element* head, int64_t row_stride, int columns,
                               const Side& side, int64_t b, int first) {
  constexpr int kRowsAtOnce = kThreads / Tile::kChunks;
  static_assert(kThreads % Tile::kChunks == 0 && kRows % kRowsAtOnce == 0);
  const int row = threadIdx.x / Tile::kChunks, chunk = threadIdx.x % Tile::kChunks;
  const bool in_row = chunk * Tile::kInChunk < columns;
  const typename Tile::Element* from = head + (first + row) * row_stride + chunk * Tile::kInChunk;
#pragma unroll
  for (int i = 0; i < kRows; i += kRowsAtOnce) {
    copy_16_bytes(tile.chunk(i + row, chunk), from, in_row && side.is_real(b, first + i + row));
    from += kRowsAtOnce * row_stride;
  }
}

// Calls visit(sum, row, column) for those of a warp's sums of 16 kRowBlocks x 8 kColumnBlocks that this lane holds.
template <int kRowBlocks, int kColumnBlocks, class Visit>
FASTATTN_DEVICE void each(Sums (&sums)[kRowBlocks][kColumnBlocks], Visit visit) {
#pragma unroll
  for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
    for (int c = 0; c < kColumnBlocks; ++c) {
#pragma unroll
      for (int i = 0; i < 4; ++i) visit(sums[r][c][i], 16 * r + 8 * (i / 2) + lane() / 4, 8 * c + 2 * (lane() % 4) + i % 2);
    }
  }
}

}  // namespace fastattn::cuda

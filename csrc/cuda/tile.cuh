// Rows of a head in shared memory.
#pragma once

#include <cstdint>
#include <type_traits>

#include "instructions.cuh"
#include "params.h"

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

// Begins to copy the rows first, ..., first + kRows - 1 of a head, zeros for those that are not real, and for all
// columns from `columns` on.
template <int kRows, int kThreads, class Tile>
FASTATTN_DEVICE void copy_rows(Tile tile, const Rows& rows, int h, int columns, const Side& side, int b, int first) {
  constexpr int kTogether = kThreads < Tile::kChunks ? kThreads : Tile::kChunks;  // threads that copy a row
  constexpr int kRowsAtOnce = kThreads / kTogether;
  static_assert(kThreads % kTogether == 0 && Tile::kChunks % kTogether == 0 && kRows % kRowsAtOnce == 0);
  const int row = threadIdx.x / kTogether;
  const auto* from = rows.head<const typename Tile::Element>(b, h) + (first + row) * rows.row_stride;
#pragma unroll 2  // no more: the tiles of queries are long
  for (int i = 0; i < kRows; i += kRowsAtOnce) {
    const bool real = side.is_real(b, first + i + row);
#pragma unroll
    for (int chunk = threadIdx.x % kTogether; chunk < Tile::kChunks; chunk += kTogether) {
      const int column = chunk * Tile::kInChunk;
      copy_16_bytes(tile.chunk(i + row, chunk), from + column, real && column < columns);
    }
    from += kRowsAtOnce * rows.row_stride;
  }
}

// The number of one of the codes, of which a chunk has 8 or 4.
FASTATTN_DEVICE float number_of(uint64_t codes, int i, Stored stored) {
  const uint32_t code = codes >> (8 * i) & 0xff;
  if (stored == Stored::int8) return int8_t(code);
  constexpr uint32_t kNaN = 0x7f;
  constexpr float kOfExponents = 0x1p120f;  // those of float8_e4m3fn count from -7, those of fp32 from -127
  const uint32_t magnitude = code & kNaN, sign = code >> 7;
  return __uint_as_float(magnitude == kNaN ? 0x7fffffff : sign << 31 | magnitude << 20) * kOfExponents;
}

// Writes a chunk of elements: the numbers of as many codes, times their scale.
FASTATTN_DEVICE void store_numbers(float* chunk, uint64_t codes, Stored stored, float scale) {
  const auto number = [&](int i) { return number_of(codes, i, stored) * scale; };
  *reinterpret_cast<float4*>(chunk) = make_float4(number(0), number(1), number(2), number(3));
}
template <class Element>
FASTATTN_DEVICE void store_numbers(Element* chunk, uint64_t codes, Stored stored, float scale) {
  const auto pair = [&](int i) {
    return pack<Element>(number_of(codes, i, stored) * scale, number_of(codes, i + 1, stored) * scale);
  };
  *reinterpret_cast<uint4*>(chunk) = {pair(0), pair(2), pair(4), pair(6)};
}

// The same of rows in pages. Elements of codes are written at once, not by copies that run meanwhile.
template <int kRows, int kThreads, class Tile>
FASTATTN_DEVICE void copy_rows(Tile tile, const PagedRows& paged, int h, int columns, const Side& side, int b,
                               int first) {
  using Element = typename Tile::Element;
  const unsigned page_size = paged.page_size;
  const int64_t first_in_table = int64_t(b) * (side.n / page_size);
#pragma unroll 2
  for (int i = threadIdx.x; i < kRows * Tile::kChunks; i += kThreads) {
    const int row = i / Tile::kChunks, chunk = i % Tile::kChunks, column = chunk * Tile::kInChunk;
    const unsigned token = first + row;
    const bool real = side.is_real(b, token);
    const int64_t page = real ? paged.page(first_in_table + token / page_size) : 0;
    const int64_t in_head = token % page_size * paged.rows.row_stride + column * paged.column_stride;
    Element* to = tile.chunk(row, chunk);
    const auto each_column = [&](auto visit) {
#pragma unroll 1
      for (int e = 0; e < Tile::kInChunk; ++e) visit(e, real && column + e < columns);
    };
    if (paged.stored == Stored::elements) {
      const Element* from = paged.rows.head<const Element>(page, h) + in_head;
      if (paged.in_chunks) {
        copy_16_bytes(to, from, real && column < columns);
      } else {
        each_column([&](int e, bool exists) { to[e] = exists ? from[e * paged.column_stride] : Element{}; });
      }
    } else {
      const uint8_t* from = paged.rows.head<const uint8_t>(page, h) + in_head;
      uint64_t codes = 0;
      if (!paged.in_chunks) {
        each_column([&](int e, bool exists) {
          if (exists) codes |= uint64_t(from[e * paged.column_stride]) << (8 * e);
        });
      } else if (real && column < columns) {
        using Codes = std::conditional_t<Tile::kInChunk == 8, uint64_t, uint32_t>;
        codes = *reinterpret_cast<const Codes*>(from);
      }
      store_numbers(to, codes, paged.stored, real ? paged.scale(page, h, token % page_size) : 0);
    }
  }
}

// Writes two elements to the columns `column` and `column` + 1 of a row.
FASTATTN_DEVICE void store_pair(float* row, int column, float low, float high) {
  *reinterpret_cast<float2*>(row + column) = make_float2(low, high);
}
template <class Element>
FASTATTN_DEVICE void store_pair(Element* row, int column, float low, float high) {
  *reinterpret_cast<uint32_t*>(row + column) = pack<Element>(low, high);
}

// Writes a warp's sums as rows first, ... of a head, each times factor_of(i) where i counts the rows that this lane
// holds: they are 8 apart. Rows that are not real, or whose factor is 0, are 0 whatever stands in the sums.
template <class Element, int kRowBlocks, int kColumnBlocks, class FactorOf>
FASTATTN_DEVICE void store_rows(const Sums (&sums)[kRowBlocks][kColumnBlocks], const Rows& rows, int h, int columns,
                                const Side& side, int b, int first, FactorOf factor_of) {
#pragma unroll
  for (int i = 0; i < 2 * kRowBlocks; ++i) {
    const int token = first + 8 * i + lane() / 4;
    if (token >= side.n) continue;
    const float factor = factor_of(i);
    const bool real = side.is_real(b, token) && factor != 0;  // NaN is not 0: what was seen must come out
    Element* row = rows.head<Element>(b, h) + token * rows.row_stride;
#pragma unroll
    for (int c = 0; c < kColumnBlocks; ++c) {
      const int column = 8 * c + 2 * (lane() % 4);
      const float* pair = &sums[i / 2][c][2 * (i % 2)];
      if (column < columns) store_pair(row, column, real ? pair[0] * factor : 0, real ? pair[1] * factor : 0);
    }
  }
}

// Calls visit(sum..., row, column) for those of a warp's sums of 16 kRowBlocks x 8 kColumnBlocks that this lane holds.
template <int kRowBlocks, int kColumnBlocks, class Visit, class... More>
FASTATTN_DEVICE void each(Visit visit, Sums (&sums)[kRowBlocks][kColumnBlocks], More&... more) {
#pragma unroll
  for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
    for (int c = 0; c < kColumnBlocks; ++c) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        visit(sums[r][c][i], more[r][c][i]..., 16 * r + 8 * (i / 2) + lane() / 4, 8 * c + 2 * (lane() % 4) + i % 2);
      }
    }
  }
}

}  // namespace fastattn::cuda

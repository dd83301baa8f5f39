// Forward for few queries: a block of threads takes all heads that share keys, so that these are read once, and a part
// of the keys, so that there are blocks for all multiprocessors: Flash-Decoding (Dao, Haziza, Massa and Sizov, 2023).
// Sums of parts are added in a fixed order, and parts of which nothing is seen change no bit.
#pragma once

#include <cstdint>

#include "../softmax.h"
#include "forward.cuh"
#include "instructions.cuh"
#include "kernels.h"
#include "online_softmax.cuh"
#include "params.h"
#include "scores.cuh"
#include "tile.cuh"
#include "tiling.h"
#include "visible_tiles.cuh"

namespace fastattn::cuda {

// Writes a pair of columns of the output of a query: 0 where it is not real or sees nothing, whatever the sums are.
template <class Element>
FASTATTN_DEVICE void store_output(const ForwardParams& f, int b, int h, int query, int column, float2 pair,
                                  float on_sums) {
  const bool seen = f.params.queries.is_real(b, query) && on_sums != 0;  // NaN is not 0
  Element* row = f.o.head<Element>(b, h) + query * f.o.row_stride;
  store_pair(row, column, seen ? pair.x * on_sums : 0, seen ? pair.y * on_sums : 0);
}

// Where the statistics of a query stand among those of a part.
FASTATTN_DEVICE int64_t index_in_parts(const Params& p, int part, int b, int h, int query) {
  return ((int64_t(part) * p.B + b) * p.H + h) * p.queries.n + query;
}

// A block of threads takes a tile of the rows of a group of heads, and one of the parts.
template <class Tiling, bool kGeneral>
__global__ void __launch_bounds__(Tiling::kThreads) decoding_kernel(const __grid_constant__ ForwardParams f) {
  using Element = typename Tiling::Element;
  using Tile = SharedTile<Element, Tiling::kHeadDim>;
  constexpr int kThreads = Tiling::kThreads, kWarps = Tiling::kWarps, kColumns = Tiling::kColumns;
  constexpr int kBlocksOfO = Tiling::kHeadDim / 8;
  if constexpr (kHasTensorCores<Element>) {
    const Params& p = f.params;
    const int n_rows = p.queries.n * p.group(), row_tiles = tiles_of(n_rows, Tiling::kRows);
    const int i_head = blockIdx.x / row_tiles, i_part = i_head / p.H_kv;
    const int first_row = blockIdx.x % row_tiles * Tiling::kRows;
    const int h_kv = i_head % p.H_kv, part = i_part % f.parts.count, b = i_part / f.parts.count;
    const PlaceInGroup rows{b, h_kv * p.group(), p.group(), first_row, 0};

    const Tile q{reinterpret_cast<Element*>(shared_memory())};
    const Tile k{q.data + Tiling::kRows * Tiling::kHeadDim};
    const Tile v{k.data + kColumns * Tiling::kHeadDim};
    const int first_column = Tiling::kColumnsOfWarp * warp(), before_warp = first_column * Tiling::kHeadDim;
    const auto copy = [&](Tile tile, const Rows& side_by_side, const PagedRows& paged, int columns, int key) {
      if (paged.table) {
        copy_rows<kColumns, kThreads>(tile, paged, h_kv, columns, p.keys, b, key);
      } else {
        copy_rows<kColumns, kThreads>(tile, side_by_side, h_kv, columns, p.keys, b, key);
      }
    };
    const auto copy_q = [&] {
      for (int i = threadIdx.x; i < Tiling::kRows * Tile::kChunks; i += kThreads) {
        const int row = i / Tile::kChunks, column = i % Tile::kChunks * Tile::kInChunk, query = rows.query(row, 0);
        const auto* from = p.q.head<const Element>(b, rows.head(row)) + query * p.q.row_stride + column;
        copy_16_bytes(q.chunk(row, i % Tile::kChunks), from, p.queries.is_real(b, query) && column < p.d_qk);
      }
    };

    VisibleTiles<true, kColumns> tiles(p, b, 0, p.queries.n);
    tiles.keep(part * f.parts.keys, f.parts.keys);
    OnlineSoftmax<Element, 1> softmax;
    Sums o[1][kBlocksOfO] = {};
    attend<kGeneral, Tiling::kColumnsOfWarp / 8>(
        softmax, o, f, tiles, q, 0, Tile{k.data + before_warp}, Tile{v.data + before_warp}, copy_q,
        [&](int key) { copy(k, p.k, f.paged_k, p.d_qk, key); }, [&](int key) { copy(v, p.v, f.paged_v, p.d_v, key); },
        [&](int key) {
          PlaceInGroup place = rows;
          place.first_column = key + first_column;
          return place;
        });

    // Each warp leaves what it has, and adds up every kWarps-th block of columns of all warps.
    __syncthreads();  // the tiles are no longer read
    auto& sums_of = *reinterpret_cast<float2(*)[kWarps][2][kBlocksOfO][kWarp]>(shared_memory());
    auto& rows_of = *reinterpret_cast<float2(*)[kWarps][Tiling::kRows]>(&sums_of + 1);  // maximum and sum
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = softmax.whole_sum(half, f.headroom);
      if (lane() % 4 == 0) rows_of[warp()][lane() / 4 + 8 * half] = make_float2(softmax.max[0][half], sum);
#pragma unroll
      for (int c = 0; c < kBlocksOfO; ++c) {
        // Where nothing is seen the sums may be NaN: of weights of 0 and values that other rows see.
        sums_of[warp()][half][c][lane()] =
            sum == 0 ? float2{0, 0} : make_float2(o[0][c][2 * half], o[0][c][2 * half + 1]);
      }
    }
    __syncthreads();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane() / 4 + 8 * half, query = rows.query(row, 0), h = rows.head(row);
      if (first_row + row >= n_rows) continue;
      JoinedSums joined;
      JoinedSums::Factors factors[kWarps];
#pragma unroll
      for (int i = 0; i < kWarps; ++i) {
        const float2 of_warp = rows_of[i][row];
        factors[i] = joined.add(of_warp.x, of_warp.y, p.score_scale.on_score_log2);
      }
      const bool one_writes = warp() == 0 && lane() % 4 == 0, is_whole = f.parts.count == 1;
      const int64_t in_parts = index_in_parts(p, part, b, h, query);
      float on_sums = 1;
      if (is_whole) {
        on_sums = finish_row<kGeneral>(f, b, h, query, {joined.max, joined.sum, 1}, one_writes);
      } else if (one_writes) {
        f.parts.max[in_parts] = joined.max, f.parts.sum[in_parts] = joined.sum;
      }
      for (int c = warp(); c < kBlocksOfO; c += kWarps) {
        float2 pair{0, 0};
#pragma unroll
        for (int i = 0; i < kWarps; ++i) pair = factors[i].joined(pair, sums_of[i][half][c][lane()]);
        const int column = 8 * c + 2 * (lane() % 4);
        if (column >= p.d_v) break;
        if (is_whole) {
          store_output<Element>(f, b, h, query, column, pair, on_sums);
        } else if (joined.sum != 0) {
          store_pair(f.parts.o + in_parts * f.parts.row_stride, column, pair.x, pair.y);
        }
      }
    }
  }
}

constexpr int kThreadsOfCombining = kMostColumns / 2;

// Adds what decoding_kernel has left of the parts: a block of threads for each query of each head.
template <class Element>
__global__ void __launch_bounds__(kThreadsOfCombining) combining_kernel(const __grid_constant__ ForwardParams f) {
  constexpr int kWarps = kThreadsOfCombining / kWarp, kPairs = kMostColumns / 2 / kWarp;
  const Params& p = f.params;
  const int i_head = blockIdx.x / p.queries.n, query = blockIdx.x % p.queries.n, h = i_head % p.H, b = i_head / p.H;
  const float on_score_log2 = p.score_scale.on_score_log2;
  // Each warp takes every kWarps-th part, and each lane every kWarp-th pair of columns.
  JoinedSums joined;
  float2 o[kPairs] = {};
  for (int part = warp(); part < f.parts.count; part += kWarps) {
    const int64_t in_parts = index_in_parts(p, part, b, h, query);
    const float sum = f.parts.sum[in_parts];
    if (sum == 0) continue;
    const JoinedSums::Factors factors = joined.add(f.parts.max[in_parts], sum, on_score_log2);
    const auto* pairs = reinterpret_cast<const float2*>(f.parts.o + in_parts * f.parts.row_stride);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int pair = lane() + i * kWarp;
      if (2 * pair < p.d_v) o[i] = factors.joined(o[i], pairs[pair]);
    }
  }
  __shared__ float2 sums_of[kWarps][kMostColumns / 2], rows_of[kWarps];
#pragma unroll
  for (int i = 0; i < kPairs; ++i) sums_of[warp()][lane() + i * kWarp] = o[i];
  if (lane() == 0) rows_of[warp()] = make_float2(joined.max, joined.sum);
  __syncthreads();
  JoinedSums all;
  float2 pair{0, 0};
#pragma unroll
  for (int i = 0; i < kWarps; ++i) {
    pair = all.add(rows_of[i].x, rows_of[i].y, on_score_log2).joined(pair, sums_of[i][threadIdx.x]);
  }
  const float on_sums = finish_row<true>(f, b, h, query, {all.max, all.sum, 1}, threadIdx.x == 0);
  const int column = 2 * threadIdx.x;
  if (column < p.d_v) store_output<Element>(f, b, h, query, column, pair, on_sums);
}

}  // namespace fastattn::cuda

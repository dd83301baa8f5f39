// Forward: each block of threads computes some rows of a head's output, key tile by key tile. The keys of the next tile
// are on their way while the values of this one are multiplied, and its values while its keys are.
#pragma once

#include "online_softmax.cuh"
#include "product.cuh"
#include "scores.cuh"
#include "seen.cuh"
#include "tiling.h"

namespace fastattn::cuda {

// Writes `pair` to the columns `column` and `column` + 1 of a row that begins at a multiple of 4 bytes.
FASTATTN_DEVICE void store_pair(float* row, int column, float low, float high) {
  *reinterpret_cast<float2*>(row + column) = {low, high};
}
template <class Element>
FASTATTN_DEVICE void store_pair(Element* row, int column, float low, float high) {
  *reinterpret_cast<uint32_t*>(row + column) = pack<Element>(low, high);
}

template <class Tiling, bool kGeneral>
__global__ void __launch_bounds__(Tiling::kThreads) forward_kernel(const Forward f) {
  using Element = typename Tiling::Element;
  using Tile = SharedTile<Element, Tiling::kHeadDim>;
  constexpr int kThreads = Tiling::kThreads, kRowBlocks = Tiling::kRowBlocks, kColumns = Tiling::kColumns;
  if constexpr (kHasTensorCores<Element>) {
    const Problem& p = f.problem;
    const int n_tiles = (int(p.queries.n) + Tiling::kRows - 1) / Tiling::kRows;
    const int first_query = (n_tiles - 1 - blockIdx.x % n_tiles) * Tiling::kRows;  // the last ones may see the most keys
    const int h = blockIdx.x / n_tiles % p.H, b = blockIdx.x / n_tiles / p.H;

    char* memory = shared_memory();
    const Tile q{reinterpret_cast<Element*>(memory)};
    const Tile k{q.data + Tiling::kRows * Tiling::kHeadDim};
    const Tile v{k.data + kColumns * Tiling::kHeadDim};
    const Element* k_head = p.k.head<const Element>(b, h / p.group());
    const Element* v_head = p.v.head<const Element>(b, h / p.group());
    SeenTiles<true, kColumns, kThreads> seen(p, b, first_query, Tiling::kRows,
                                             reinterpret_cast<int*>(v.data + kColumns * Tiling::kHeadDim));

    const int first_row = 16 * kRowBlocks * warp();
    OnlineSoftmax<Element, kRowBlocks> softmax;
    Sums o[kRowBlocks][Tiling::kHeadDim / 8] = {};
    SeenTile tile, next;
    bool more = seen.next(tile);
    if (more) {
      copy_rows<Tiling::kRows, kThreads>(q, p.q.head<const Element>(b, h), p.q.row_stride, p.d_qk, p.queries, b, first_query);
      copy_rows<kColumns, kThreads>(k, k_head, p.k.row_stride, p.d_qk, p.keys, b, tile.first);
      commit_copies();
    }
    while (more) {
      wait_for_copies<0>();
      __syncthreads();
      copy_rows<kColumns, kThreads>(v, v_head, p.v.row_stride, p.d_v, p.keys, b, tile.first);
      commit_copies();

      Sums s[kRowBlocks][kColumns / 8] = {};
      add_product(s, q, first_row, k);
      const Place<true> place{b, h, first_query + first_row, tile.first};
      finish_scores<kGeneral>(s, p, place);
      if (tile.edge) hide<kGeneral>(s, -kInfinity, p, place);
      softmax.add(s, p.scale.on_score_log2, o);
      if constexpr (kGeneral) {
        if (p.dropout.drops) each_kept(s, p, place, [](float& weight, bool kept) { weight = kept ? weight : 0; });
      }

      more = seen.next(next);
      wait_for_copies<0>();
      __syncthreads();
      if (more) {
        copy_rows<kColumns, kThreads>(k, k_head, p.k.row_stride, p.d_qk, p.keys, b, next.first);
        commit_copies();
      }
      add_weighted(o, s, v);
      tile = next;
    }

#pragma unroll
    for (int i = 0; i < 2 * kRowBlocks; ++i) {
      const int r = i / 2, half = i % 2, query = first_query + first_row + 8 * i + lane() / 4;
      const float sum = sum_of_row(softmax.sum[r][half]);
      if (query >= p.queries.n) continue;
      const bool saw = p.queries.is_real(b, query) && sum != 0;  // NaN that was seen must come out
      const float factor = !kGeneral || !p.dropout.drops ? one_over_sum(sum) : one_over_sum(sum) * p.dropout.on_kept;
      Element* o_row = f.o.head<Element>(b, h) + int64_t(query) * f.o.row_stride;
#pragma unroll
      for (int c = 0; c < Tiling::kHeadDim / 8; ++c) {
        const int column = 8 * c + 2 * (lane() % 4);
        if (column >= p.d_v) continue;
        store_pair(o_row, column, saw ? o[r][c][2 * half] * factor : 0, saw ? o[r][c][2 * half + 1] * factor : 0);
      }
      if (lane() % 4 == 0) {
        f.lse[(int64_t(b) * p.H + h) * p.queries.n + query] =
            saw ? lse_of(softmax.max[r][half], p.scale.on_score_log2, log2f(sum)) : -kInfinity;
      }
    }
  }
}

}  // namespace fastattn::cuda

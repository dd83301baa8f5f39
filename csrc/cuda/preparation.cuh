// Small kernels that run before the large ones: summaries of groups of tokens, and the stats of each query.
#pragma once

#include <cmath>
#include <cstdint>

#include "../softmax.h"
#include "instructions.cuh"
#include "online_softmax.cuh"
#include "params.h"
#include "product.cuh"
#include "scores.cuh"
#include "tile.cuh"
#include "tiling.h"
#include "visible_tiles.cuh"

namespace fastattn::cuda {

constexpr int kThreadsOfPreparation = 128;

// Summarizes the tokens of a group: one thread for each group of each sample.
static __global__ void __launch_bounds__(kThreadsOfPreparation)
    token_groups_kernel(const __grid_constant__ Side side, const int B) {
  const int64_t i = int64_t(blockIdx.x) * kThreadsOfPreparation + threadIdx.x, n = side.group_count();
  if (i >= B * n) return;
  const int64_t b = i / n, first = i % n * kTokenGroup;
  Tokens tokens = Tokens::none();
  for (int64_t token = first; token < first + kTokenGroup && token < side.n; ++token) {
    if (!side.is_real(b, token)) {
      tokens.all_real = false;
      continue;
    }
    const int64_t position = side.position_of(b, token), document = side.document_of(b, token);
    tokens.add({true, true, position, position, document, document});
  }
  tokens.all_real &= first + kTokenGroup <= side.n;
  side.groups[i] = tokens;
}

// Computes the stats of a query: one warp for each, also for those that pad their number.
template <class Element>
__global__ void __launch_bounds__(kThreadsOfPreparation) query_stats_kernel(const __grid_constant__ BackwardParams g) {
  const Params& p = g.params;
  const int64_t i = int64_t(blockIdx.x) * (kThreadsOfPreparation / kWarp) + warp(), n = padded_queries(p.queries.n);
  if (i >= int64_t(p.B) * p.H * n) return;
  const int query = i % n, h = i / n % p.H, b = i / n / p.H;
  const int64_t of_query = (int64_t(b) * p.H + h) * p.queries.n + query;
  const bool seen = p.queries.is_real(b, query) && g.lse[of_query] != -kInfinity;
  float delta = 0;
  if (seen) {
    const Element* o = g.o.head<const Element>(b, h) + query * g.o.row_stride;
    const Element* d_o = g.d_o.head<const Element>(b, h) + query * g.d_o.row_stride;
    for (int column = lane(); column < p.d_v; column += kWarp) delta += to_float(o[column]) * to_float(d_o[column]);
  }
#pragma unroll
  for (int other = kWarp / 2; other > 0; other /= 2) delta += __shfl_xor_sync(~0u, delta, other);
  if (lane() != 0) return;
  const int64_t head = i / n;
  g.stats.of_head(head, RowStat::lse_log2)[query] = seen ? float(g.lse[of_query] * kLog2E) : kInfinity;
  g.stats.of_head(head, RowStat::rest_log2)[query] = 0;
  g.stats.of_head(head, RowStat::delta)[query] = seen && g.d_lse ? delta - g.d_lse[of_query] : delta;
}

// Computes rest_log2. In fp32 a large lse is rounded so much that the weights that it gives do not sum to 1: what they
// sum to tells the rest.
template <class Tiling, bool kGeneral>
__global__ void __launch_bounds__(Tiling::kThreads) rest_of_lse_kernel(const __grid_constant__ BackwardParams g) {
  using Element = typename Tiling::Element;
  using Tile = SharedTile<Element, Tiling::kHeadDim>;
  constexpr int kThreads = Tiling::kThreads, kRowBlocks = Tiling::kRowBlocks, kColumns = Tiling::kColumns;
  const Params& p = g.params;
  const int n_tiles = (p.queries.n + Tiling::kRows - 1) / Tiling::kRows;
  const int first_query = blockIdx.x % n_tiles * Tiling::kRows;
  const int h = blockIdx.x / n_tiles % p.H, b = blockIdx.x / n_tiles / p.H;
  const Tile q{reinterpret_cast<Element*>(shared_memory())};
  const Tile k{q.data + Tiling::kRows * Tiling::kHeadDim};
  int* list = reinterpret_cast<int*>(k.data + kColumns * Tiling::kHeadDim);
  copy_rows<Tiling::kRows, kThreads>(q, p.q, h, p.d_qk, p.queries, b, first_query);
  commit_copies();

  const int first_row = 16 * kRowBlocks * warp();
  const int64_t head = int64_t(b) * p.H + h;
  const float* lse_log2 = g.stats.of_head(head, RowStat::lse_log2) + first_query + first_row;
  float sum[2 * kRowBlocks] = {};
  VisibleTiles<true, kColumns, kThreads> tiles(p, b, first_query, Tiling::kRows, list);
  for (VisibleTile tile; tiles.next(tile);) {
    __syncthreads();
    copy_rows<kColumns, kThreads>(k, p.k, h / p.group(), p.d_qk, p.keys, b, tile.first);
    commit_copies();
    wait_for_copies<0>();
    __syncthreads();
    Sums s[kRowBlocks][kColumns / 8] = {};
    add_product(s, q, first_row, k);
    const Place<true> place{b, h, first_query + first_row, tile.first};
    finish_scores<kGeneral>(s, p, place);
    if (tile.partial) hide<kGeneral>(s, p, place);
    const auto add = [&](float& x, int row, int) {
      sum[row / 8] += exp2_for<Element>(fmaf(x, p.score_scale.on_score_log2, -lse_log2[row]));
    };
    each(add, s);
  }
#pragma unroll
  for (int i = 0; i < 2 * kRowBlocks; ++i) {
    const int row = 8 * i + lane() / 4;
    float total = sum_of_row(sum[i]);
    if (kGeneral && p.sinks) {
      total += exp2_for<Element>(fmaf(p.sinks[h], p.score_scale.on_score_log2, -lse_log2[row]));
    }
    if (lane() % 4 == 0)
      g.stats.of_head(head, RowStat::rest_log2)[first_query + first_row + row] = total == 0 ? 0 : log2f(total);
  }
  wait_for_copies<0>();
}

}  // namespace fastattn::cuda

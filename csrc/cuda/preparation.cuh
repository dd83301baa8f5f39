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
  for (int64_t token = first; token < first + kTokenGroup; ++token) {
    if (!side.is_real(b, token)) {
      tokens.all_real = false;
      continue;
    }
    const int64_t position = side.position_of(b, token), document = side.document_of(b, token);
    tokens.add({true, true, position, position, document, document});
  }
  side.groups[i] = tokens;
}

// Computes the stats of a query: one warp for each, also for those that pad their number.
template <class Element>
__global__ void __launch_bounds__(kThreadsOfPreparation) query_stats_kernel(const __grid_constant__ BackwardParams g) {
  const Params& p = g.params;
  const int64_t i = int64_t(blockIdx.x) * (kThreadsOfPreparation / kWarp) + warp(), n = padded(p.queries.n);
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
  const float on_score_log2 = p.score_scale.on_score_log2;
  Measure from{0, kInfinity};
  if (seen) from = Measure::of(g.lse[of_query] * kLog2E / on_score_log2, 1, on_score_log2);
  g.stats.of_head(head, RowStat::reference)[query] = from.reference;
  g.stats.of_head(head, RowStat::rest_log2)[query] = from.rest_log2;
  g.stats.of_head(head, RowStat::delta)[query] = seen && g.d_lse ? delta - g.d_lse[of_query] : delta;
}

// Whether the rounding of an lse is no matter beside that of the weights, which are off by the factor it takes from it.
template <class Element>
FASTATTN_DEVICE bool is_precise(float lse) {
  return sizeof(Element) < sizeof(float) && !(fabsf(lse) > 1024 && lse != -kInfinity);
}

// Computes the Measure of the queries whose lse is not precise anew, from their scores.
template <class Tiling, bool kGeneral>
__global__ void __launch_bounds__(Tiling::kThreads) measure_kernel(const __grid_constant__ BackwardParams g) {
  using Element = typename Tiling::Element;
  using Tile = SharedTile<Element, Tiling::kHeadDim>;
  constexpr int kThreads = Tiling::kThreads, kRowBlocks = Tiling::kRowBlocks, kColumns = Tiling::kColumns;
  if constexpr (kHasTensorCores<Element>) {
    const Params& p = g.params;
    const float on_score_log2 = p.score_scale.on_score_log2;
    const int n_tiles = (p.queries.n + Tiling::kRows - 1) / Tiling::kRows;
    const int first_query = blockIdx.x % n_tiles * Tiling::kRows;
    const int h = blockIdx.x / n_tiles % p.H, b = blockIdx.x / n_tiles / p.H;
    const int64_t head = int64_t(b) * p.H + h;
    const auto precise = [&](int query) {
      return query >= p.queries.n || is_precise<Element>(g.lse[head * p.queries.n + query]);
    };
    bool some_imprecise = false;
    for (int i = threadIdx.x; i < Tiling::kRows; i += kThreads) some_imprecise |= !precise(first_query + i);
    if (!__syncthreads_or(some_imprecise)) return;

    const Tile q{reinterpret_cast<Element*>(shared_memory())};
    const Tile k{q.data + Tiling::kRows * Tiling::kHeadDim};
    copy_rows<Tiling::kRows, kThreads>(q, p.q, h, p.d_qk, p.queries, b, first_query);
    commit_copies();

    const int first_row = 16 * kRowBlocks * warp();
    float max[2 * kRowBlocks], sum[2 * kRowBlocks] = {};
    for (float& x : max) x = -kInfinity;
    VisibleTiles<true, kColumns> tiles(p, b, first_query, Tiling::kRows);
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
      float old_max[2 * kRowBlocks];
#pragma unroll
      for (int i = 0; i < 2 * kRowBlocks; ++i) old_max[i] = max[i];
      each([&](float& x, int row, int) { max[row / 8] = fmaxf(max[row / 8], x); }, s);
#pragma unroll
      for (int i = 0; i < 2 * kRowBlocks; ++i) {
        max[i] = max_of_row(max[i]);
        sum[i] *= exp2f((old_max[i] - finite_max(max[i])) * on_score_log2);
      }
      each([&](float& x, int row, int) { sum[row / 8] += exp2f((x - finite_max(max[row / 8])) * on_score_log2); }, s);
    }
#pragma unroll
    for (int i = 0; i < 2 * kRowBlocks; ++i) {
      const int query = first_query + first_row + 8 * i + lane() / 4;
      RowSum row{max[i], sum_of_row(sum[i]), 1};
      if (kGeneral && p.sinks) row = row.beside(p.sinks[h], on_score_log2);
      if (lane() % 4 != 0 || row.sum == 0 || precise(query)) continue;
      const Measure from = Measure::of(row.max, row.sum, on_score_log2);
      g.stats.of_head(head, RowStat::reference)[query] = from.reference;
      g.stats.of_head(head, RowStat::rest_log2)[query] = from.rest_log2;
    }
    wait_for_copies<0>();
  }
}

}  // namespace fastattn::cuda

// What the backward kernels do with a tile of pairs: from the products q.k and dO.v to the weights P and to dS.
#pragma once

#include <cmath>
#include <cstdint>

#include "instructions.cuh"
#include "online_softmax.cuh"
#include "params.h"
#include "scores.cuh"
#include "tile.cuh"

namespace fastattn::cuda {

// The stats of one query: see RowStat.
struct RowStats {
  float reference, rest_log2, delta;
};

// Loads the stats of the queries that are a lane's rows, the first of which is query `row` of that head.
template <int kRows>
FASTATTN_DEVICE void load_stats(RowStats (&stats)[kRows], const StatsOfQueries& all, int64_t head, int row) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const auto load = [&](RowStat stat) { return all.of_head(head, stat)[row + 8 * i]; };
    stats[i] = {load(RowStat::reference), load(RowStat::rest_log2), load(RowStat::delta)};
  }
}

// Turns products q.k into weights, 0 where dropout drops them and without its factor, and products dO.v into the
// gradients of scale * q.k. stats_of(row, column) returns the stats of the pair's query. Where scores are general,
// visit(row, column, weight, ds) gets the gradient of the score.
template <class Element, bool kGeneral, bool kRowsAreQueries, int kRowBlocks, int kColumnBlocks, class StatsOf,
          class Visit>
FASTATTN_DEVICE void weights_and_gradients(Sums (&s)[kRowBlocks][kColumnBlocks], Sums (&dp)[kRowBlocks][kColumnBlocks],
                                           const Params& p, Place<kRowsAreQueries> place, bool partial,
                                           StatsOf stats_of, Visit visit) {
  const auto weight_of = [&](float score, RowStats stats) {
    return exp2_for<Element>(fmaf(score - stats.reference, p.score_scale.on_score_log2, -stats.rest_log2));
  };
  if constexpr (!kGeneral) {
    finish_scores<false>(s, p, place);
    if (partial) hide<false>(s, p, place);
    each(
        [&](float& x, float& dx, int row, int column) {
          const RowStats stats = stats_of(row, column);
          x = weight_of(x, stats);
          dx = x * (dx - stats.delta);
        },
        s, dp);
  } else {
    VisiblePairs<kRowBlocks, kColumnBlocks> visible;
    for (uint32_t& columns : visible.columns) columns = ~0u;
    if (partial) visible = visible_pairs<true, kRowBlocks, kColumnBlocks>(p, place);
    each(
        [&](float& x, float& dx, int row, int column) {
          const RowStats stats = stats_of(row, column);
          const Score score = score_of<true>(x, p, place, row, column);
          const float weight = visible.at(row, column) ? weight_of(score.value, stats) : 0;
          const bool survives = !p.dropout.drops || survives_dropout(p, place, row, column);
          const float on_dp = p.dropout.drops ? p.dropout.on_kept : 1;
          const float ds = visible.at(row, column) ? weight * ((survives ? dx * on_dp : 0) - stats.delta) : 0;
          visit(row, column, weight, ds);
          dx = ds * score.d_score;
          x = survives ? weight : 0;
        },
        s, dp);
  }
}

}  // namespace fastattn::cuda

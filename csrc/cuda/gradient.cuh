// What the backward kernels do with a tile of pairs: from the products q.k and dO.v to the weights P and to dS.
#pragma once

#include <cmath>
#include <cstdint>

#include "instructions.cuh"
#include "online_softmax.cuh"
#include "problem.h"
#include "scores.cuh"
#include "tile.cuh"

namespace fastattn::cuda {

// Those of one query: see Fact.
struct Facts {
  float lse_log2, rest_log2, delta;
};

// Those of the queries that a lane's rows are, of which the first stands `row` rows after the first query of that head.
template <int kRows>
FASTATTN_DEVICE void load_facts(Facts (&facts)[kRows], const QueryFacts& all, int64_t head, int row) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const auto load = [&](Fact fact) { return all.of_head(head, fact)[row + 8 * i]; };
    facts[i] = {load(Fact::lse_log2), load(Fact::rest_log2), load(Fact::delta)};
  }
}

// Products q.k become weights, without those that dropout drops and before its factor; products dO.v become the gradients
// of scale * q.k. facts_of(row, column) tells those of the pair's query; visit(row, column, weight, ds) is shown the
// gradient of what the softmax is taken of, where scores are general.
template <class Element, bool kGeneral, bool kRowsAreQueries, int kRowBlocks, int kColumnBlocks, class FactsOf, class Visit>
FASTATTN_DEVICE void weights_and_gradients(Sums (&s)[kRowBlocks][kColumnBlocks], Sums (&dp)[kRowBlocks][kColumnBlocks],
                                           const Problem& p, Place<kRowsAreQueries> place, bool edge, FactsOf facts_of,
                                           Visit visit) {
  const auto weight_of = [&](float score, Facts facts) {
    return exp2_for<Element>(fmaf(score, p.score_scale.on_score_log2, -facts.lse_log2) - facts.rest_log2);
  };
  if constexpr (!kGeneral) {
    finish_scores<false>(s, p, place);
    if (edge) hide<false>(s, p, place);
    each(
        [&](float& x, float& dx, int row, int column) {
          const Facts facts = facts_of(row, column);
          x = weight_of(x, facts);
          dx = x * (dx - facts.delta);
        },
        s, dp);
  } else {
    Shown<kRowBlocks, kColumnBlocks> shown;
    for (uint32_t& columns : shown.columns) columns = ~0u;
    if (edge) shown = shown_pairs<true, kRowBlocks, kColumnBlocks>(p, place);
    each(
        [&](float& x, float& dx, int row, int column) {
          const Facts facts = facts_of(row, column);
          const Score score = score_of<true>(x, p, place, row, column);
          const float weight = shown.at(row, column) ? weight_of(score.value, facts) : 0;
          const bool survives = !p.dropout.drops || survives_dropout(p, place, row, column);
          const float on_dp = p.dropout.drops ? p.dropout.on_kept : 1;
          const float ds = shown.at(row, column) ? weight * ((survives ? dx * on_dp : 0) - facts.delta) : 0;
          visit(row, column, weight, ds);
          dx = ds * score.steepness;
          x = survives ? weight : 0;
        },
        s, dp);
  }
}

}  // namespace fastattn::cuda

// Isolated runs of few keys, such as short documents: all of their keys are a single block. The softmax need not be an
// online one, so nothing is rescaled; and in products whose rows are queries the queries are on the left, where lanes
// without a query cost nothing.
//
//   S^T = K Q^T     P^T = softmax(S^T)                            O = P V
//   dP^T = V dO^T   dS^T = P^T * (dP^T - sum(P^T * dP^T) + dlse)  dQ = dS K   dV += P^T dO   dK += dS^T Q
//
// Backward finds P and delta from the scores, as exactly as forward does, and reads neither lse nor O.
#pragma once

#include <cstdint>

#include "arith_fp32.h"
#include "backward.h"
#include "bias.h"
#include "blocks.h"
#include "dropout.h"
#include "forward.h"
#include "matrix.h"
#include "params.h"
#include "prefetch.h"
#include "product.h"
#include "rows.h"
#include "vector.h"
#include "weights.h"

namespace fastattn::FASTATTN_ISA {
namespace {

// to[i] = factors[i] * row i of left * y, for the first rows of `left`, over n steps; y is [n, d]. One function without
// a branch for all that is written: its tiles are most of the code that a call of few keys runs through.
void multiply_from_left(Columns left, int64_t rows, int64_t n, Rows y, int64_t d, const float* factors,
                        float* const* to) {
  each_column_tile(padded(d), [&](auto vectors, int64_t column) {
    constexpr int V = decltype(vectors)::value;
    each_tile<kTileRows<V>>(0, rows, [&](auto tile_rows, int64_t i) {
      Floats acc[decltype(tile_rows)::value][V];
      product(n, left.at_row(i), Right{y.data + column, y.stride}, acc);
      each_vector(acc, [&](Floats& x, int r, int c) { store(to[i + r] + column + c * kLanes, x * factors[i + r]); });
    });
  });
}

// Writes factors[i] * row i of left * y for every query of a block: O = P V, and dQ = dS K. `copy` [M, padded d] is for
// rows that take no whole vectors of floats.
void write_product(const Output& x, int64_t b, int64_t h, const IndexList& list, const QueryBlock& queries,
                   Columns left, int64_t n, Rows y, int64_t d, const float* factors, float* copy) {
  const bool in_place = x.dtype == DType::f32 && d % kLanes == 0;
  float* to[kBlockQueries];
  for (int64_t i = 0; i < queries.n; ++i) {
    to[i] = in_place ? reinterpret_cast<float*>(x.row(b, h, list.at(queries.first + i))) : copy + i * padded(d);
  }
  multiply_from_left(left, queries.n, n, y, d, factors, to);
  for (int64_t i = 0; !in_place && i < queries.n; ++i) write_row(x, b, h, list.at(queries.first + i), d, to[i], 1.0f);
}

// Writes 2^(S^T - m) of a part of the keys, times Z^T if given, the largest scores m, and the sums l without Z^T.
template <int C>
FASTATTN_INLINE void softmax_single_block(const Params& p, int64_t b, int64_t h, const QueryBlock& queries,
                                          const KeyBlock& keys, Part part, const float* q_t, const float* z_t,
                                          float* p_t, Floats (&m)[C], Floats (&l)[C]) {
  Floats unused[C];
  for (int c = 0; c < C; ++c) m[c] = splat(-kInfinity), l[c] = Floats{};
  assign_product<C>(p_t, part.n, steps_over(p.d_qk), keys.k.at_row(part.begin), Right{q_t, C * kLanes});
  finish_scores(C, p, b, h, queries, keys, part, p_t);
  follow_maximum<C>(part.n, p_t, p.on_score_log2(), m, unused);
  weights<C>(p, part.n, m, z_t, p_t, l);
}

// Adds the weights P^T, divided by their sums, to those of other heads.
template <int C>
FASTATTN_ONCE void add_weights_single_block(Part part, const float* p_t, const float* on_row, float* sums) {
  sums += part.begin * C * kLanes;
  for (int64_t i = 0; i < part.n * C * kLanes; i += kLanes) {
    store(sums + i, load(sums + i) + load(p_t + i) * load(on_row + i % (C * kLanes)));
  }
}

template <int C>
void attend_single_block(const Params& p, const ForwardOutputs& out, int64_t b, int64_t h, const KeyBlock& keys,
                         const QueryBlock& queries, Prefetch& prefetch, const ForwardScratch& w, float* sums) {
  const IndexList& list = p.queries[b];
  const int64_t n = queries.n;
  const Rows q = rows_of(p.q, b, h, list, queries.first, n, n, p.d_qk, true, w.q);
  transpose_queries(q, n, padded(p.d_qk), split_scale(p.scale).on_query, w.q_t, C * kLanes);

  const Part part = visible_part(queries.range.some, keys);
  const float* const z_t = p.dropout.drops ? w.z_t : nullptr;
  if (z_t) dropout_factors(C, p.dropout, b, h, queries, keys, part, w.z_t);
  Floats m[C], l[C];
  prefetch.step();
  softmax_single_block<C>(p, b, h, queries, keys, part, w.q_t, z_t, w.p_t, m, l);

  Floats on_o[C];
  float lse[C * kLanes], on_row[C * kLanes];
  finish_softmax(C, p, h, m, l, on_o, lse);
  for (int c = 0; c < C; ++c) store(on_row + c * kLanes, on_o[c]);
  if (sums) add_weights_single_block<C>(part, w.p_t, on_row, sums);
  prefetch.step();
  write_product(out.o, b, h, list, queries, {w.p_t, C * kLanes}, part.n, keys.v.at_row(part.begin), p.d_v, on_row,
                w.o_t);
  for (int64_t i = 0; i < n; ++i) {  // not 0 times a NaN that other queries see
    if (on_row[i] == 0) zero_row(out.o, b, h, list.at(queries.first + i), p.d_v);
  }
  write_statistics(p, out, b, h, queries, m, l, lse);
}

// The queries first, ..., last - 1 of an isolated run. Adds the weights of the last block of them to `sums`
// [keys, vectors of queries], unless null.
void attend_single_block(const Params& p, const ForwardOutputs& out, int64_t b, int64_t h,
                         const IsolatedRun& isolated_run, int64_t first, int64_t last, Prefetch& prefetch,
                         const ForwardScratch& w, float* sums) {
  const IndexList& list = p.keys[b];
  const int64_t first_key = list.lower_bound(isolated_run.keys.begin),
                n = list.lower_bound(isolated_run.keys.end) - first_key;
  KeyBlock keys{&list, first_key, n, {}, {}, {}, {}};
  keys.k = rows_of(p.k, b, h / p.group(), list, first_key, n, n, p.d_qk, false, w.k);
  keys.v = rows_of(p.v, b, h / p.group(), list, first_key, n, n, p.d_v, true, w.v);
  for (; first < last; first += kBlockQueries) {
    QueryBlock queries;
    queries.init(p, b, h, p.queries[b], isolated_run, first, lesser(kBlockQueries, last - first));
    with_columns(columns_of(queries.n),
                 [&](auto C) { attend_single_block<C>(p, out, b, h, keys, queries, prefetch, w, sums); });
  }
}

int64_t joint_scratch(const Params& p) {
  if (p.isolated_runs) return 0;
  for (int64_t b = 0; b < p.B; ++b) {
    if (!fits_single_block(p, b, {0, p.queries[b].count, {0, p.n_k}, false})) return 0;
  }
  return ForwardScratch(p, nullptr).size + WeightsScratch(p, 0, nullptr).size;
}

// The output, and the weights averaged over the heads of an item.
void attend_with_weights(const Params& p, const ForwardOutputs& out, const Output& weights, const WeightsItem& item,
                         float* scratch) {
  const ForwardScratch w(p, scratch);
  const WeightsScratch of_weights(p, 0, scratch + w.size);
  const IndexList &queries = p.queries[item.b], &list = p.keys[item.b];
  zero_weights_of_padding(p, weights, item);
  for (int64_t h = item.first_head; h < item.last_head; ++h) {
    write_padding(p, out, item.b, h, item.first_query, lesser(item.last_query, p.n_q));
  }
  const IsolatedRun whole{0, queries.count, {0, p.n_k}, false};
  const int64_t end = lesser(item.last_query, queries.count);
  for (int64_t first = item.first_query; first < end; first += kBlockQueries) {
    const int64_t last = lesser(first + kBlockQueries, end);
    Prefetch nothing;
    __builtin_memset(of_weights.sums, 0, of_weights.summed_keys * kBlockQueries * sizeof(float));
    for (int64_t h = item.first_head; h < item.last_head; ++h) {
      attend_single_block(p, out, item.b, h, whole, first, last, nothing, w, of_weights.sums);
    }
    QueryBlock block;
    block.init(p, item.b, item.first_head, queries, first, last - first);
    write_weights(columns_of(block.n), p, weights, item, block, Chunk(list, p.n_k, 0), of_weights);
  }
}

// Turns 2^(S^T - m) and dP^T [n, M] into Z^T * P^T and dS^T, in place.
template <int C>
FASTATTN_INLINE void gradients_single_block(int64_t n, const Floats (&one_over_l)[C], const Floats (&d_lse)[C],
                                            const float* z_t, float* p_t, float* dp_t) {
  Floats delta[C];
  for (int c = 0; c < C; ++c) delta[c] = Floats{};
  for (int64_t i = 0; i < n; ++i) {
    for (int c = 0; c < C; ++c) {
      const int64_t at = (i * C + c) * kLanes;
      Floats dp = load(dp_t + at);
      if (z_t) store(dp_t + at, dp *= load(z_t + at));
      delta[c] += load(p_t + at) * dp;
    }
  }
  for (int c = 0; c < C; ++c) delta[c] = delta[c] * one_over_l[c] - d_lse[c];
  for (int64_t i = 0; i < n; ++i) {
    for (int c = 0; c < C; ++c) {
      const int64_t at = (i * C + c) * kLanes;
      Floats weight = load(p_t + at) * one_over_l[c];
      store(dp_t + at, weight * (load(dp_t + at) - delta[c]));
      if (z_t) weight *= load(z_t + at);
      store(p_t + at, weight);
    }
  }
}

// Adds to dk and dv, the rows of the keys `own` of the isolated run.
template <int C>
void add_gradients_single_block(const Params& p, const BackwardTensors& t, const BackwardItem& item, int64_t h,
                                const IndexList& list, const KeyBlock& keys, Part own, const QueryBlock& queries,
                                bool writes_rows, float* dk, float* dv, Prefetch& prefetch, const BackwardScratch& w) {
  constexpr int64_t M = C * kLanes;
  const int64_t b = item.b, n = queries.n;
  BackwardBlock block;
  w.place_block(p, 0, block);
  const Rows q = rows_of(p.q, b, h, list, queries.first, n, n, p.d_qk, true, block.q_copy);
  transpose_queries(q, n, padded(p.d_qk), split_scale(p.scale).on_query, block.q_t, M);
  Floats d_lse[C], m[C], l[C], one_over_l[C];
  float of_lanes[M];  // d_lse, and after that the lse, which is not read
  for (int64_t i = 0; i < M; ++i) {
    const int64_t query = (b * p.H + h) * p.n_q + list.at(queries.first + lesser(i, n - 1));
    of_lanes[i] = t.d_lse ? t.d_lse[query] : 0.0f;
  }
  for (int c = 0; c < C; ++c) d_lse[c] = load(of_lanes + c * kLanes);

  const Part part = visible_part(queries.range.some, keys);
  const float* const z_t = p.dropout.drops ? w.z_t : nullptr;
  if (z_t) dropout_factors(C, p.dropout, b, h, queries, keys, part, w.z_t);
  prefetch.step();
  softmax_single_block<C>(p, b, h, queries, keys, part, block.q_t, nullptr, w.s_t, m, l);
  finish_softmax(C, p, h, m, l, one_over_l, of_lanes);
  prefetch.step();
  Rows d_o{};
  if (t.d_o.data) {
    d_o = rows_of(t.d_o, b, h, list, queries.first, n, n, p.d_v, true, block.d_o_copy);
    transpose_queries(d_o, n, padded(p.d_v), 1.0f, block.d_o_t, M);
    const Right d_o_t{block.d_o_t, M};
    assign_product<C>(w.dp_t, part.n, steps_over(p.d_v), keys.v.at_row(part.begin), d_o_t);
  } else {
    __builtin_memset(w.dp_t, 0, part.n * M * sizeof(float));
  }
  gradients_single_block<C>(part.n, one_over_l, d_lse, z_t, w.s_t, w.dp_t);

  if (writes_rows && item.wanted.by_query && t.d_row) {
    for (int64_t lane = 0; lane < n; ++lane) {
      float& sum = t.d_row[(b * p.H + h) * p.n_q + list.at(queries.first + lane)];
      for (int64_t i = 0; i < part.n; ++i) sum += w.dp_t[i * M + lane];
    }
  }
  if (writes_rows && item.wanted.dq) {
    prefetch.step();
    float scale[M];
    for (int64_t i = 0; i < M; ++i) scale[i] = static_cast<float>(p.scale);
    write_product(t.dq, b, h, list, queries, {w.dp_t, M}, part.n, keys.k.at_row(part.begin), p.d_qk, scale, block.dq_t);
  }
  const Part rows = own.between(part.begin, part.end());
  if (!item.wanted.dkv || rows.n == 0) return;
  const int64_t from = (rows.begin - part.begin) * M, to = rows.begin - own.begin;
  prefetch.step();
  if (d_o.data) {
    accumulate_rows(w.s_t + from, M, rows.n, n, Right{d_o.data, d_o.stride}, p.d_v, dv + to * padded(p.d_v));
  }
  prefetch.step();
  accumulate_rows(w.dp_t + from, M, rows.n, n, Right{q.data, q.stride}, p.d_qk, dk + to * padded(p.d_qk));
}

// The queries first, ..., last - 1 of an isolated run against those of its keys that lie in a chunk. Their weights take
// all of its keys; gradients with rows of queries are written with the chunk that has the first key.
void add_gradients_single_block(const Params& p, const BackwardTensors& t, const BackwardItem& item, int64_t h,
                                const IndexList& queries, const IsolatedRun& isolated_run, int64_t first, int64_t last,
                                int64_t chunk_begin, int64_t chunk_end, Prefetch& prefetch, const BackwardScratch& w) {
  const IndexList& list = p.keys[item.b];
  const int64_t first_key = list.lower_bound(isolated_run.keys.begin),
                n = list.lower_bound(isolated_run.keys.end) - first_key;
  const Part own = Part{0, n}.between(chunk_begin - first_key, chunk_end - first_key);
  if (own.n == 0) return;
  KeyBlock keys{&list, first_key, n, {}, {}, {}, {}};
  keys.k = rows_of(p.k, item.b, item.h_kv, list, first_key, n, n, p.d_qk, true, w.k);
  keys.v = rows_of(p.v, item.b, item.h_kv, list, first_key, n, n, p.d_v, false, w.v);
  const int64_t row = first_key + own.begin - chunk_begin;
  for (; first < last; first += kBlockQueries) {
    QueryBlock block;
    block.init(p, item.b, h, queries, isolated_run, first, lesser(kBlockQueries, last - first));
    with_columns(columns_of(block.n), [&](auto C) {
      add_gradients_single_block<C>(p, t, item, h, queries, keys, own, block, own.begin == 0,
                                    w.dk + row * padded(p.d_qk), w.dv + row * padded(p.d_v), prefetch, w);
    });
  }
}

}  // namespace
}  // namespace fastattn::FASTATTN_ISA

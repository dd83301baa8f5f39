// Backward: the heads that share keys and values, strip by strip of queries as in forward.h, with P recomputed from lse
// (Dao et al. 2022, algorithm 4), transposed. delta = rowsum(dO * O); the gradient of lse is P.
//
//   S^T = K Q^T    P^T = 2^(S^T - lse)    dP^T = V dO^T    dS^T = P^T * (dP^T - delta + dlse)
//   dV += P^T dO   dK += dS^T Q           dQ^T += K^T dS^T
//
// Dropout multiplies the weights by Z, which changes two of these: dP^T = Z^T * V dO^T, and dV += (Z^T * P^T) dO. What
// arrives at the weights Z * P themselves is added to V dO^T, and what a pass of its own sums of it is added to delta.
//
// An item owns the gradients it writes, and sums each over all of its queries or over all of its keys, in order: sums
// without atomics, and the same bits however the work is split.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "arith.h"
#include "bias.h"
#include "blocks.h"
#include "dropout.h"
#include "forward.h"
#include "matrix.h"
#include "microkernel.h"
#include "params.h"
#include "prefetch.h"
#include "rows.h"
#include "vector.h"

namespace fastattn::FASTATTN_ISA {
namespace {

// Keys whose dK and dV stay in the L2 cache while every strip of queries adds to them.
int64_t cached_keys(const Params& p) {
  constexpr int64_t kCacheFloats = (512 << 10) / sizeof(float);
  const int64_t size = block_keys(p), blocks = kCacheFloats / greater(1, padded(p.d_qk) + padded(p.d_v)) / size;
  return greater(1, lesser(blocks, (p.n_k + size - 1) / size)) * size;
}

// Where the chunk of keys that begins there ends, before `last`. Chunks are cut at the same places for every item: dQ
// is rounded where they meet.
int64_t end_of_chunk(const Params& p, int64_t begin, int64_t last) {
  return lesser((begin / cached_keys(p) + 1) * cached_keys(p), last);
}

// The state of a block of queries between two blocks of keys. Per lane, what turns S into P and dP into dS: lse is the
// sum of two floats (rounded to one, it would double the error of P), one that S is measured from, and a rest.
struct BackwardBlock {
  QueryBlock queries;
  float *q_copy, *d_o_copy;  // rows
  int64_t stride;
  float *q_t, *d_o_t;          // [d, stride], for the sums over the head dim
  float *q_right, *d_o_right;  // for the sums over the queries, where rows do not serve
  Right q, d_o;                // the same, wherever they are
  float* dq_t;                 // [d_qk, stride]
  Floats reference[kColumns], rest_log2[kColumns], delta[kColumns], d_lse[kColumns];
  Floats d_slope[kColumns], d_row[kColumns];
};

struct BackwardScratch {
  float *k, *v, *k_t;          // copies of a block of keys, where they are needed
  float *s_t, *dp_t, *z_t;     // [most_keys, M]
  float* d_score;              // [block_keys, M]: derivative of the scores by scale * S
  float *weights, *ds, *ds_t;  // Z^T * P^T and dS^T as left factors, and dS^T as a right one
  float *dk, *dv;              // [cached_keys, d]
  int32_t* queries;            // [n_q]
  float* strip;                // what its blocks point to
  int64_t size;

  BackwardScratch(const Params& p, float* base) {
    constexpr int64_t M = kBlockQueries;
    const int64_t block = block_keys(p), most = most_keys(p);
    Arena arena(base);
    k = arena.take(most * units(p.d_qk));
    v = arena.take(most * units(p.d_v));
    k_t = arena.take(transposed_size(block, p.d_qk));
    s_t = arena.take(most * M);
    dp_t = arena.take(most * M);
    z_t = arena.take(p.dropout.drops ? most * M : 0);
    d_score = arena.take(p.softcap > 0 ? block * M : 0);
    weights = s_t, ds = dp_t;  // in place, which both forms allow
    ds_t = kOneForm ? ds : arena.take(block * M / kPerUnit);
    dk = arena.take((cached_keys(p) + kGrain) * padded(p.d_qk));  // a block may end in the middle of a grain
    dv = arena.take((cached_keys(p) + kGrain) * padded(p.d_v));
    queries = reinterpret_cast<int32_t*>(arena.take(p.n_q));
    strip = arena.take(0);
    BackwardBlock unused;
    for (int64_t i = 0; i < kStripBlocks; ++i) take_block(p, arena, unused);
    size = arena.used();
  }

  // Points to the memory of block i of a strip.
  void place_block(const Params& p, int64_t i, BackwardBlock& block) const {
    Arena arena(strip);
    for (int64_t j = 0; j <= i; ++j) take_block(p, arena, block);
  }

 private:
  static void take_block(const Params& p, Arena& arena, BackwardBlock& block) {
    constexpr int64_t M = kBlockQueries;
    block.q_copy = arena.take(M * units(p.d_qk));
    block.d_o_copy = arena.take(M * units(p.d_v));
    block.q_t = arena.take(M * units(p.d_qk));
    block.d_o_t = arena.take(M * units(p.d_v));
    block.q_right = arena.take(over_queries_size(M, p.d_qk));
    block.d_o_right = arena.take(over_queries_size(M, p.d_v));
    block.dq_t = arena.take(M * padded(p.d_qk));
  }
};

// The rounding of a smaller lse costs P at most 4 units in the last place. That is much beside a plain softmax over few
// keys, which hardly rounds at all.
constexpr double precise_lse(DType dtype) { return dtype == DType::f32 ? 16 : 1024; }
constexpr int64_t kFewKeys = 32;

// The queries of a head numbered begin, ..., end - 1 that have a gradient: the real ones that see something: their lse
// is above -inf, or NaN.
IndexList contributing_queries(const Params& p, const BackwardTensors& t, int64_t b, int64_t h, int64_t begin,
                               int64_t end, int32_t* table) {
  const IndexList& real = p.queries[b];
  const float* lse = t.lse + (b * p.H + h) * p.n_q;
  const int64_t first = real.lower_bound(begin), last = real.lower_bound(end), n = last - first;
  int64_t count = 0;
  if (n > 0 && real.consecutive(first, n) && !holds(lse + real.at(first), n, -kInfinity)) {
    return {nullptr, real.at(first), n};
  }
  for (int64_t i = first; i < last; ++i) {
    const int64_t query = real.at(i);
    if (lse[query] != -kInfinity) table[count++] = static_cast<int32_t>(query);
  }
  return {table, 0, count};
}

// Few queries do not fill the lanes: as in decode.h, those are the head dim for them. The plain formula is a product
// with a few vectors then, whose sums are short, and rounds less than chains along the head dim.
constexpr int64_t kFewQueries = 3;
inline bool is_for_few(const Params& p) { return kOneForm && p.n_q <= kFewQueries; }

// to[i, j] = a[i] . (factor * b[j]) for n rows of d and a few of b; zeros in the other lanes.
FASTATTN_ONCE void assign_products_of_few(float* to, int64_t n, int64_t d, Rows a, Right b, int64_t n_few,
                                          float factor) {
  for (int64_t i = 0; i < n; i += kLanes) {
    Floats products[kLanes] = {};
    for (int64_t j = 0; j < n_few; ++j) {
      Floats of_rows[kLanes] = {};
      for (int64_t vector = 0; vector < units(d) / kLanes; ++vector) {
        const Floats y = b(j, vector) * factor;
#pragma GCC unroll 16
        for (int row = 0; row < kLanes; ++row) {
          const Rows x = a.at_row(lesser(i + row, n - 1));
          of_rows[row] = multiply_add(load(x.data + vector * kLanes), y, of_rows[row]);
        }
      }
      products[j] = sums_of_lanes(of_rows);
    }
    if (n_few == 1) {
      for (int64_t row = 0; row < lesser(kLanes, n - i); ++row) store(to + (i + row) * kLanes, splat(products[0][row]));
      continue;
    }
    transpose(products);
    for (int64_t row = 0; row < lesser(kLanes, n - i); ++row) store(to + (i + row) * kLanes, products[row]);
  }
}

// P of vector c of the queries from S. The difference first: see weight of forward.h. It is above 1 by rounding only.
FASTATTN_INLINE Floats weight_from_lse(const BackwardBlock& block, int c, Floats s, float on_score_log2) {
  return exp2(at_most((s - block.reference[c]) * on_score_log2 - block.rest_log2[c], 0.0f));
}

// Writes S^T of a part of the keys and vectors first, ..., first + C - 1 of a block of queries, hidden ones -inf.
FASTATTN_ONCE void scores(int C, const Params& p, int64_t b, int64_t h, const KeyBlock& keys, Part part,
                          const QueryBlock& queries, const BackwardBlock& block, int first, float* s_t,
                          float* d_score = nullptr) {
  const Rows k = keys.k.at_row(part.begin);
  if (is_for_few(p)) {
    assign_products_of_few(s_t, part.n, p.d_qk, k, block.q, queries.n, split_scale(p.scale).on_query);
  } else {
    const Right q_t{block.q_t + first * kLanes, block.stride};
    with_columns(C, [&](auto columns) { assign_product<columns>(s_t, part.n, steps_over(p.d_qk), k, q_t); });
  }
  finish_scores(C, p, b, h, queries, keys, part, s_t, d_score);
}

// An lse of 1000 is rounded by up to 3e-5, and every weight of its row is off by that factor; one of 1e9 says nothing
// of the weights. The Measure is then found anew from the scores, by the online softmax of forward.
template <int C>
void measure_anew(const Params& p, int64_t b, int64_t h, int first, const bool* imprecise, BackwardBlock& block,
                  const BackwardScratch& w) {
  const IndexList& list = p.keys[b];
  const QueryBlock queries = block.queries.vectors(first, C);
  const float on_score_log2 = p.on_score_log2();
  Floats m[C], l[C], decay[C];
  for (int c = 0; c < C; ++c) m[c] = splat(-kInfinity), l[c] = Floats{};
  each_key_block(list, queries.range.some, queries.origin, 0, list.count, kBlockKeys, [&](int64_t i, int64_t n) {
    KeyBlock keys{&list, i, n, {}, {}, {}, {}};
    keys.k = rows_of(p.k, b, h / p.group(), list, i, n, up_to_grain(n), p.d_qk, is_for_few(p), w.k);
    const Part part = visible_part(queries.range.some, keys);
    scores(C, p, b, h, keys, part, queries, block, first, w.s_t);
    if (follow_maximum<C>(part.n, w.s_t, on_score_log2, m, decay)) {
      for (int c = 0; c < C; ++c) l[c] *= decay[c];
    }
    weights<C>(p, part.n, m, nullptr, w.s_t, l);
  });
  Floats unused[C];
  float lse[C * kLanes];
  finish_softmax(C, p, h, m, l, unused, lse);
  for (int lane = 0; lane < C * kLanes; ++lane) {
    if (!imprecise[lane]) continue;
    const int c = lane / kLanes, i = lane % kLanes;
    const Measure from = Measure::of(m[c][i], l[c][i], on_score_log2);
    block.reference[first + c][i] = from.reference, block.rest_log2[first + c][i] = from.rest_log2;
  }
}

// Sums delta as dP is summed in fp32, in the same order: a query that sees a single key, where O = V, then has dS = 0
// to the bit.
void sum_delta(int C, const Params& p, const BackwardTensors& t, int64_t b, int64_t h, const IndexList& queries,
               BackwardBlock& block, const BackwardScratch& w) {
  for (int c = 0; c < C; ++c) block.delta[c] = Floats{};
  if (!t.d_o.data) return;
  if (is_for_few(p)) {
    const int64_t n = block.queries.n;
    // d_o_t has room for rows of O: few queries take dO by rows, and never read its transpose.
    const Rows o = rows_of(t.o, b, h, queries, block.queries.first, n, n, p.d_v, true, block.d_o_t);
    assign_products_of_few(w.dp_t, n, p.d_v, o, block.d_o, n, 1.0f);
    for (int64_t i = 0; i < n; ++i) block.delta[0][i] = w.dp_t[i * kLanes + i];
    return;
  }
  for (int c = 0; c < C; ++c) {
    const int64_t first = block.queries.first + c * kLanes, n = block.queries.n - c * kLanes;
    for (int64_t begin = 0; n > 0 && begin < p.d_v; begin += kPartOfHeadDim) {
      Floats part = {};
      for (int64_t d = begin; d < lesser(begin + kPartOfHeadDim, p.d_v); d += kLanes) {
        Floats o[kLanes], d_o[kLanes];
        read_columns(t.o, b, h, queries, first, n, d, p.d_v, o);
        if (!kOneForm) read_columns(t.d_o, b, h, queries, first, n, d, p.d_v, d_o);
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) {
          part += o[i] * (kOneForm ? load(block.d_o_t + (d + i) * block.stride + c * kLanes) : d_o[i]);
        }
      }
      block.delta[c] += part;
    }
  }
}

// Prepares a block of queries.
void begin_block(int C, const Params& p, const BackwardTensors& t, const BackwardItem& item, int64_t h,
                 const IndexList& queries, BackwardBlock& block, const BackwardScratch& w) {
  const int64_t M = C * kLanes;
  const int64_t b = item.b, first = block.queries.first, n = block.queries.n, row_of_head = (b * p.H + h) * p.n_q;
  block.stride = M;

  const Rows q = rows_of(p.q, b, h, queries, first, n, M, p.d_qk, true, block.q_copy);
  transpose_queries(q, n, units(p.d_qk), split_scale(p.scale).on_query, block.q_t, M);
  block.q = over_queries(q, M, p.d_qk, block.q_right);
  const int64_t n_d_o = t.d_o.data ? n : 0;  // else all zeros
  const Rows d_o = rows_of(t.d_o, b, h, queries, first, n_d_o, M, p.d_v, true, block.d_o_copy);
  transpose_queries(d_o, M, units(p.d_v), 1.0f, block.d_o_t, M);
  block.d_o = over_queries(d_o, M, p.d_v, block.d_o_right);
  if (item.wanted.dq) __builtin_memset(block.dq_t, 0, M * padded(p.d_qk) * sizeof(float));
  for (int c = 0; c < C; ++c) block.d_slope[c] = block.d_row[c] = Floats{};

  sum_delta(C, p, t, b, h, queries, block, w);

  bool imprecise[kBlockQueries], any_imprecise[kColumns] = {};  // query by query: the others in a block must not matter
  for (int64_t i = 0; i < M; ++i) {
    const int64_t query = row_of_head + queries.at(first + lesser(i, n - 1)), c = i / kLanes, lane = i % kLanes;
    Measure from = Measure::of(t.lse[query] * p.scores_per_nat(), 1, p.on_score_log2());
    const bool in_fp32 = p.q.dtype == DType::f32, few = is_for_few(p) || block.queries.length[c][lane] <= kFewKeys;
    imprecise[i] = std::fabs(t.lse[query]) > precise_lse(p.q.dtype) ||
                   (in_fp32 ? few || t.d_weights.data : few && t.d_weights.data);
    if (imprecise[i] && t.measures) {
      SharedMeasure found;
      __atomic_load(t.measures + query, &found, __ATOMIC_RELAXED);
      if (found.value.reference != 0 || found.value.rest_log2 != 0) from = found.value, imprecise[i] = false;
    }
    any_imprecise[c] |= imprecise[i];
    block.reference[c][lane] = from.reference, block.rest_log2[c][lane] = from.rest_log2;
    block.d_lse[c][lane] = (t.d_lse ? t.d_lse[query] : 0.0f) - (t.delta_of_weights ? t.delta_of_weights[query] : 0.0f);
  }
  for (int c = 0; c < C; c += kFewestColumns) {
    if (any_imprecise[c] || any_imprecise[c + kFewestColumns - 1]) {
      measure_anew<kFewestColumns>(p, b, h, c, imprecise + c * kLanes, block, w);
    }
  }
  for (int64_t i = 0; t.measures && i < n; ++i) {
    if (!imprecise[i]) continue;
    SharedMeasure found{{block.reference[i / kLanes][i % kLanes], block.rest_log2[i / kLanes][i % kLanes]}};
    __atomic_store(t.measures + row_of_head + queries.at(first + i), &found, __ATOMIC_RELAXED);
  }
}

// Adds dS of n keys, not yet rounded, to the sum in each query's lane; its input is that of gradients_of_scores.
FASTATTN_ONCE void add_d_row(int C, int64_t n, int first, float on_score_log2, bool drops, BackwardBlock& block,
                             const BackwardScratch& w) {
  for (int c = 0; c < C; ++c) {
    Floats sum = {};  // of its own: sums of sums round less
    for (int64_t i = 0; i < n; ++i) {
      const int64_t at = (i * C + c) * kLanes;
      const Floats dp = load(w.dp_t + at) * (drops ? load(w.z_t + at) : splat(1.0f));
      const Floats p = weight_from_lse(block, first + c, load(w.s_t + at), on_score_log2);
      sum += p * (dp + (block.d_lse[first + c] - block.delta[first + c]));
    }
    block.d_row[first + c] += sum;
  }
}

// V dO^T += d_weights^T.
FASTATTN_ONCE void add_d_weights(int C, const Params& p, const BackwardTensors& t, int64_t b, int64_t h,
                                 const QueryBlock& queries, const KeyBlock& keys, Part part, int first,
                                 const BackwardBlock& block, const BackwardScratch& w) {
  with_elements(t.d_weights.data, t.d_weights_dtype, [&](auto* data) {
    using Element = std::remove_const_t<std::remove_pointer_t<decltype(data)>>;
    with_entries<Element>(C, t.d_weights, b, h, queries, keys, part, w.dp_t, [&](float* dp, Floats d_weights) {
      const int64_t at = dp - w.dp_t, c = first + at / kLanes % C;
      Floats weights = weight_from_lse(block, c, load(w.s_t + at), p.on_score_log2());
      if (p.dropout.drops) weights *= load(w.z_t + at);
      store(dp, load(dp) + (weights == 0 ? Floats{} : d_weights));  // 0 times what arrives there, inf of a logarithm
    });
  });
}

// Turns S^T and dP^T [n, M] into Z^T * P^T and dS^T, in the forms that the sums take.
template <int C>
FASTATTN_INLINE void gradients_of_scores(int64_t n, const BackwardBlock& block, int first, float on_score_log2,
                                         bool drops, const BackwardScratch& w) {
  Floats d_lse_minus_delta[C];
  for (int c = 0; c < C; ++c) d_lse_minus_delta[c] = block.d_lse[first + c] - block.delta[first + c];
  for (int64_t i = 0; i < n; i += kPerUnit) {
    Floats weights[kPerUnit][C], ds[kPerUnit][C];
    each_vector(weights, [&](Floats& p, int r, int c) {
      const int64_t at = ((i + r) * C + c) * kLanes;
      p = weight_from_lse(block, first + c, load(w.s_t + at), on_score_log2);
      // Without a branch, so that compilers round it alike wherever they inline it.
      const Floats z = drops ? load(w.z_t + at) : splat(1.0f);
      ds[r][c] = p * (load(w.dp_t + at) * z + d_lse_minus_delta[c]);
      p *= z;
    });
    store_left(w.weights, i, weights);
    store_right(w.ds_t, i, ds);
    if (!kOneForm) store_left(w.ds, i, ds);
  }
}

// x[n] += a * y for n rows of d, a sum over the queries: the gradient of keys or values.
FASTATTN_ONCE void accumulate_rows(const float* a, int64_t M, int64_t n, int64_t n_queries, Right y, int64_t d,
                                   float* x) {
  const Rows left{a, M / kPerUnit};
  each_column_tile(padded(d), [&](auto vectors, int64_t column) {
    const Target to{x + column, padded(d)};
    add_product<vectors>(to, n, query_steps(n_queries, M), left, y.at_column(column));
  });
}

// Vectors first, ..., first + C - 1 of a block of queries against a part of a block of keys. dk and dv are the rows of
// the first key of the block.
template <int C>
void add_gradients(const Params& p, const BackwardTensors& t, const BackwardItem& item, int64_t h, const KeyBlock& keys,
                   Part part, const QueryBlock& queries, int first, BackwardBlock& block, float* dk, float* dv,
                   Prefetch& prefetch, const BackwardScratch& w) {
  constexpr int64_t M = C * kLanes;
  const int64_t column = first * kLanes;
  if (p.dropout.drops) dropout_factors(C, p.dropout, item.b, h, queries, keys, part, w.z_t);
  prefetch.step();
  scores(C, p, item.b, h, keys, part, queries, block, first, w.s_t, p.softcap > 0 ? w.d_score : nullptr);
  prefetch.step();
  if (is_for_few(p)) {
    assign_products_of_few(w.dp_t, part.n, p.d_v, keys.v.at_row(part.begin), block.d_o, queries.n, 1.0f);
  } else {
    const Right d_o_t{block.d_o_t + column, block.stride};
    assign_product<C>(w.dp_t, part.n, steps_over(p.d_v), keys.v.at_row(part.begin), d_o_t);
  }
  if (t.d_weights.data) add_d_weights(C, p, t, item.b, h, queries, keys, part, first, block, w);
  if (item.wanted.by_query && t.d_row) add_d_row(C, part.n, first, p.on_score_log2(), p.dropout.drops, block, w);
  gradients_of_scores<C>(part.n, block, first, p.on_score_log2(), p.dropout.drops, w);
  const auto* ds = reinterpret_cast<const LeftElement*>(w.ds);
  if (item.wanted.by_query && t.d_bias.data) add_d_bias(C, t, item.b, h, queries, keys, part, ds);
  if (item.wanted.by_query && t.d_slope) add_d_slope(C, p, item.b, queries, keys, part, ds, block.d_slope + first);
  if (item.wanted.by_key) add_d_column(C, queries, keys, part, ds, t.d_column + (item.b * p.H + h) * p.n_k);
  if (p.softcap > 0) times_d_score<C>(part.n, w.d_score, w.ds, w.ds_t);
  if (item.wanted.dq) {
    prefetch.step();
    const Transposed k_t = keys.k_t.at_step(part.begin / kPerUnit);
    add_product<C>({block.dq_t + column, block.stride}, p.d_qk, part.n / kPerUnit, k_t, PackedRight<C>{w.ds_t});
  }
  if (item.wanted.dkv) {
    const Right q = block.q.at_step(column / kPerUnit), d_o = block.d_o.at_step(column / kPerUnit);
    prefetch.step();
    accumulate_rows(w.weights, M, part.n, queries.n, d_o, p.d_v, dv + part.begin * padded(p.d_v));
    prefetch.step();
    accumulate_rows(w.ds, M, part.n, queries.n, q, p.d_qk, dk + part.begin * padded(p.d_qk));
  }
}

// Writes dQ^T, times scale, to the rows of the output, or adds it to what earlier chunks of keys gave.
void write_dq(int C, const Params& p, const BackwardTensors& t, int64_t b, int64_t h, const IndexList& queries,
              bool adds, const BackwardBlock& block) {
  const auto scale = static_cast<float>(p.scale);
  const int64_t n = block.queries.n, d_qk = p.d_qk;
  float* rows[kBlockQueries];
  for (int64_t i = 0; i < n; ++i) {
    rows[i] = reinterpret_cast<float*>(t.dq.row(b, h, queries.at(block.queries.first + i)));
  }
  transpose(
      padded(d_qk), C * kLanes, [&](int64_t d, int64_t i) { return load(block.dq_t + d * block.stride + i) * scale; },
      [&](int64_t i, int64_t d, Floats x) {
        if (i < n) narrow_lanes(rows[i] + d, adds ? widen_lanes(rows[i] + d, d_qk - d) + x : x, d_qk - d);
      });
}

// Writes zeros for the queries of an item without a gradient.
void zero_other_dq(const Params& p, const BackwardTensors& t, const BackwardItem& item, int64_t h,
                   const IndexList& contributing) {
  int64_t i = contributing.lower_bound(item.first_query);
  for (int64_t query = item.first_query; query < item.last_query; ++query) {
    if (i < contributing.count && contributing.at(i) == query) {
      ++i;
    } else {
      zero_row(t.dq, item.b, h, query, p.d_qk);
    }
  }
}

// A strip of contributing queries of an isolated run of one head against the keys of a chunk.
void add_gradients_of_strip(const Params& p, const BackwardTensors& t, const BackwardItem& item, int64_t h,
                            const IndexList& queries, const IsolatedRun& isolated_run, int64_t first_query, int64_t end,
                            int64_t chunk_begin, int64_t chunk_end, Prefetch& prefetch, const BackwardScratch& w) {
  const int64_t b = item.b;
  const IndexList& list = p.keys[b];
  const KeyRange chunk =
      chunk_begin < chunk_end ? KeyRange{list.at(chunk_begin), list.at(chunk_end - 1) + 1} : KeyRange{0, 0};
  const bool adds = chunk_begin > item.first_key;  // to the dq of other chunks
  const auto skip = [&](int64_t first, int64_t last) {
    for (int64_t i = first; item.wanted.dq && !adds && i < last; ++i) zero_row(t.dq, b, h, queries.at(i), p.d_qk);
  };
  const KeyRange by_some = p.visible_to_some(b, h, queries.at(first_query), queries.at(end - 1));
  if (!by_some.meets(chunk)) return skip(first_query, end);
  BackwardBlock blocks[kStripBlocks];
  int64_t count = 0;
  KeyRange seen{p.n_k, 0};  // by any of them
  for (int64_t first = first_query; first < end; first += kBlockQueries) {
    BackwardBlock& block = blocks[count];
    block.queries.init(p, b, h, queries, isolated_run, first, lesser(kBlockQueries, end - first));
    if (!block.queries.range.some.meets(chunk)) {
      skip(first, first + block.queries.n);
      continue;
    }
    w.place_block(p, count++, block);
    seen = hull(seen, block.queries.range.some);
    begin_block(columns_of(block.queries.n), p, t, item, h, queries, block, w);
  }

  const int64_t origin = list.lower_bound(isolated_run.keys.begin);
  const int64_t last_key = lesser(chunk_end, list.lower_bound(isolated_run.keys.end));
  each_key_block(list, seen, origin, chunk_begin, last_key, block_keys(p), [&](int64_t i, int64_t n) {
    KeyBlock keys{&list, i, n, {}, {}, {}, {}};
    keys.k = rows_of(p.k, b, item.h_kv, list, i, n, up_to_grain(n), p.d_qk, is_for_few(p), w.k);
    keys.v = rows_of(p.v, b, item.h_kv, list, i, n, up_to_grain(n), p.d_v, is_for_few(p), w.v);
    if (item.wanted.dq) keys.k_t = transposed(keys.k, up_to_grain(n), p.d_qk, w.k_t);
    float* dk = w.dk + (i - chunk_begin) * padded(p.d_qk);
    float* dv = w.dv + (i - chunk_begin) * padded(p.d_v);
    for (int64_t j = 0; j < count; ++j) {
      each_visible_part(p, b, h, queries, blocks[j].queries, keys,
                        [&](int vectors, const QueryBlock& seeing, int first, Part part) {
                          with_columns(vectors, [&](auto C) {
                            add_gradients<C>(p, t, item, h, keys, part, seeing, first, blocks[j], dk, dv, prefetch, w);
                          });
                        });
    }
  });
  for (int64_t j = 0; item.wanted.by_query && j < count; ++j) {
    for (int64_t i = 0; i < blocks[j].queries.n; ++i) {
      const int64_t row = (b * p.H + h) * p.n_q + queries.at(blocks[j].queries.first + i);
      if (t.d_slope) t.d_slope[row] += blocks[j].d_slope[i / kLanes][i % kLanes];
      if (t.d_row) t.d_row[row] += blocks[j].d_row[i / kLanes][i % kLanes];
    }
  }
  for (int64_t j = 0; item.wanted.dq && j < count; ++j) {
    write_dq(columns_of(blocks[j].queries.n), p, t, b, h, queries, adds, blocks[j]);
  }
}

// Writes the rows of the keys of a chunk, times factor, and zeros for the padding up to the next chunk.
void write_rows(const BackwardItem& item, const IndexList& keys, int64_t n_k, int64_t chunk_begin, int64_t chunk_end,
                const float* from, int64_t d, float factor, const Output& to) {
  const int64_t begin = chunk_begin == 0 ? 0 : keys.at(chunk_begin);
  const int64_t end = chunk_end == keys.count ? n_k : keys.at(chunk_end);
  int64_t i = chunk_begin;
  with_elements(to.row(item.b, item.h_kv, 0), to.dtype, [&](auto* rows) {
    for (int64_t key = begin; key < end; ++key) {
      if (i < chunk_end && keys.at(i) == key) {
        narrow_row(from + (i++ - chunk_begin) * padded(d), factor, d, rows + key * to.row_stride);
      } else {
        zero_row(to, item.b, item.h_kv, key, d);
      }
    }
  });
}

// A prefetch of what the next item reads first.
Prefetch prefetch_for(const Params& p, const BackwardTensors& t, const BackwardItem& item, const BackwardItem* next) {
  Prefetch prefetch;
  if (!next) return prefetch;
  const IndexList &queries = p.queries[next->b], &keys = p.keys[next->b];
  const int64_t first_query = queries.lower_bound(next->first_query);
  const int64_t last_query = queries.lower_bound(next->last_query);
  const int64_t last_key = end_of_chunk(p, next->first_key, next->last_key);
  bool next_single_block = true;  // for which the output is not read
  each_isolated_run(p, next->b, queries, next->first_query, next->last_query,
                    [&](const IsolatedRun& isolated_run, int64_t, int64_t) {
                      next_single_block &= fits_single_block(p, next->b, isolated_run);
                    });
  prefetch.add(p.q, next->b, next->first_head, queries, first_query, last_query, p.d_qk);
  prefetch.add(t.d_o, next->b, next->first_head, queries, first_query, last_query, p.d_v);
  if (!next_single_block) prefetch.add(t.o, next->b, next->first_head, queries, first_query, last_query, p.d_v);
  prefetch.add(p.k, next->b, next->h_kv, keys, next->first_key, last_key, p.d_qk);
  prefetch.add(p.v, next->b, next->h_kv, keys, next->first_key, last_key, p.d_v);
  if (next->wanted.dq) prefetch.add(t.dq, next->b, next->first_head, queries, first_query, last_query, p.d_qk);
  if (next->wanted.dkv) {
    prefetch.add(t.dk, next->b, next->h_kv, keys, next->first_key, last_key, p.d_qk);
    prefetch.add(t.dv, next->b, next->h_kv, keys, next->first_key, last_key, p.d_v);
  }
  const int64_t products = 2 + item.wanted.dq + 2 * item.wanted.dkv;
  const int64_t pairs = pairs_of_blocks(p, item.b, item.first_query, item.last_query, item.first_key, item.last_key);
  prefetch.spread(products * pairs * (item.last_head - item.first_head));
  return prefetch;
}

#if !FASTATTN_BF16
void add_gradients_single_block(const Params& p, const BackwardTensors& t, const BackwardItem& item, int64_t h,
                                const IndexList& queries, const IsolatedRun& isolated_run, int64_t first, int64_t last,
                                int64_t chunk_begin, int64_t chunk_end, Prefetch& prefetch, const BackwardScratch& w);
#endif

void backward(const Params& p, const BackwardTensors& t, const BackwardItem& item, const BackwardItem* next,
              float* scratch) {
  const BackwardScratch w(p, scratch);
  [[maybe_unused]] const MultiplierInUse multiplier;
  Prefetch prefetch = prefetch_for(p, t, item, next);
  IndexList queries{};  // of this head: an item of one head finds them once, not for each chunk of keys
  int64_t head_of_queries = -1;
  int64_t begin = item.first_key;
  do {
    const int64_t end = end_of_chunk(p, begin, item.last_key);
    if (item.wanted.dkv) {
      __builtin_memset(w.dk, 0, (end - begin) * padded(p.d_qk) * sizeof(float));
      __builtin_memset(w.dv, 0, (end - begin) * padded(p.d_v) * sizeof(float));
    }
    for (int64_t h = item.first_head; h < item.last_head; ++h) {
      const bool whole_runs = item.wanted.rows_of_keys();
      const int64_t from = whole_runs ? item.first_query : 0, to = whole_runs ? item.last_query : p.n_q;
      if (h != head_of_queries)
        queries = contributing_queries(p, t, item.b, h, from, to, w.queries), head_of_queries = h;
      if (item.wanted.dq && begin == item.first_key) zero_other_dq(p, t, item, h, queries);
      each_isolated_run(p, item.b, queries, item.first_query, item.last_query,
                        [&](const IsolatedRun& isolated_run, int64_t first, int64_t last) {
#if !FASTATTN_BF16
                          if (!t.d_weights.data && fits_single_block(p, item.b, isolated_run)) {
                            return add_gradients_single_block(p, t, item, h, queries, isolated_run, first, last, begin,
                                                              end, prefetch, w);
                          }
#endif
                          for (; first < last; first += kStripQueries) {
                            const int64_t strip_end = lesser(first + kStripQueries, last);
                            add_gradients_of_strip(p, t, item, h, queries, isolated_run, first, strip_end, begin, end,
                                                   prefetch, w);
                          }
                        });
    }
    if (item.wanted.dkv) {
      const IndexList& keys = p.keys[item.b];
      write_rows(item, keys, p.n_k, begin, end, w.dk, p.d_qk, static_cast<float>(p.scale), t.dk);
      write_rows(item, keys, p.n_k, begin, end, w.dv, p.d_v, 1.0f, t.dv);
    }
    begin = end;
  } while (begin < item.last_key);
}

int64_t backward_scratch(const Params& p) { return BackwardScratch(p, nullptr).size; }

}  // namespace
}  // namespace fastattn::FASTATTN_ISA

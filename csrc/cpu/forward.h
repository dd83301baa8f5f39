// Forward: a strip of queries against all keys they see, with the online softmax of FlashAttention (Dao et al. 2022,
// algorithm 1), transposed: lanes are queries, so that S^T = K Q^T takes K as it lies in memory, the softmax needs no
// sums across lanes, and hidden keys are skipped one by one.
//
// All blocks of queries of a strip attend to a block of keys before the next one is loaded: the keys stay in the L1
// cache and what has to be done to them (copied, widened, transposed) is done once. Blocks of keys begin at the
// multiples of their size, counted from the first key of their isolated run, wherever a strip begins, so that the
// result does not depend on how the queries are cut into strips.
#pragma once

#include <cstdint>

#include "arith.h"
#include "bias.h"
#include "blocks.h"
#include "dropout.h"
#include "matrix.h"
#include "microkernel.h"
#include "params.h"
#include "prefetch.h"
#include "rows.h"
#include "vector.h"

namespace fastattn::FASTATTN_ISA {
namespace {

struct ForwardScratch {
  float* q;              // [M, d]: rows of a block of queries, where they are needed
  float *k, *v, *v_t;    // copies of a block of keys, where they are needed
  float *p_t, *z_t;      // [most_keys, M], S^T and then P^T; Z^T
  float *q_t, *o_t;      // [d, M] for each block of a strip
  int64_t chunk_blocks;  // blocks of keys that are prepared together
  int64_t size;

  ForwardScratch(const Params& p, float* base) {
    Arena arena(base);
    q = arena.take(kBlockQueries * units(p.d_qk));
    chunk_blocks = key_blocks_in_chunk(p);
    const int64_t n_keys = greater(chunk_blocks * block_keys(p), kSingleBlockKeys);
    k = arena.take(n_keys * units(p.d_qk));
    v = arena.take(n_keys * units(p.d_v));
    v_t = arena.take(chunk_blocks * transposed_size(block_keys(p), p.d_v));
    p_t = arena.take(most_keys(p) * kBlockQueries);
    z_t = arena.take(p.dropout.drops ? most_keys(p) * kBlockQueries : 0);
    q_t = arena.take(kStripQueries * units(p.d_qk));
    o_t = arena.take(kStripQueries * padded(p.d_v));
    size = arena.used();
  }
};

// Prepares keys for a strip of queries, with block j of the scratch as the place for what has to be copied.
KeyBlock key_block(const Params& p, int64_t b, int64_t h_kv, int64_t first, int64_t n, const ForwardScratch& w,
                   int64_t j) {
  const IndexList& list = p.keys[b];
  const int64_t n_padded = up_to_grain(n);
  const int64_t row = j * block_keys(p);
  const Rows k = rows_of(p.k, b, h_kv, list, first, n, n_padded, p.d_qk, false, w.k + row * units(p.d_qk));
  const Rows v = rows_of(p.v, b, h_kv, list, first, n, n_padded, p.d_v, false, w.v + row * units(p.d_v));
  float* v_t = w.v_t + j * transposed_size(block_keys(p), p.d_v);
  return {&list, first, n, k, v, {}, transposed(v, n_padded, p.d_v, v_t)};
}

// The state of a block of queries between two blocks of keys: Q^T, O^T, the score m that the weights are measured from,
// and the sum l of the weights.
struct ForwardBlock {
  QueryBlock queries;
  float *q_t, *o_t;  // [d, stride]
  int64_t stride;
  Floats m[kColumns], l[kColumns];
};

// Updates the statistics with S^T [n, M]. The reference m of the weights follows the largest score only where that is
// more than kSlack above it: the weights are then at most 2^kSlack, and what was summed before is seldom rescaled.
// Returns whether it has to be, by `decay`.
constexpr float kSlack = 8;

template <int C>
FASTATTN_ONCE bool follow_maximum(int64_t n, const float* s_t, float on_score_log2, Floats (&m)[C],
                                  Floats (&decay)[C]) {
  Floats largest[C];
  for (int c = 0; c < C; ++c) largest[c] = m[c];
  each_tile<4>(0, n, [&](auto rows, int64_t i) {  // first among rows: one chain of maxima would wait for itself
    Floats result[rows][C];
    each_vector(result, [&](Floats& x, int r, int c) { x = load(s_t + ((i + r) * C + c) * kLanes); });
    each_vector(result, [&](Floats& x, int r, int c) {
      if (r > 0) result[0][c] = larger(x, result[0][c]);
    });
    for (int c = 0; c < C; ++c) largest[c] = larger(result[0][c], largest[c]);
  });
  Ints moves = {};
  for (int c = 0; c < C; ++c) {
    const Ints moves_here = (largest[c] - m[c]) * on_score_log2 > kSlack;  // from -inf too, but not to -inf
    const Floats new_m = moves_here ? largest[c] : m[c];
    decay[c] = moves_here ? exp2((m[c] - new_m) * on_score_log2) : splat(1.0f);
    m[c] = new_m;
    moves |= moves_here;
  }
  return any(moves);
}

// Weights are this power of two below 2^(scale * (score - reference)): their sum then stays below 1, and the sum of
// weighted values, which is divided by it at the end, below the largest value. It is even, so that n_k, which may be
// that of longer samples, changes no bit of the result (exp2).
FASTATTN_INLINE float headroom_log2(const Params& p) { return kSlack + (bits_of(p.n_k) + 1) / 2 * 2; }

// The difference first: the weight of the reference is then exactly a power of two, a single key gives O = V to the
// bit, and no finite scores overflow.
FASTATTN_INLINE Floats weight(Floats score, Floats reference, float scale, float headroom_log2) {
  return exp2((score - reference) * scale, headroom_log2);
}

// Turns S^T [n, M] into P^T in place, as a right factor, and adds the weights to l. Dropout multiplies them by Z after
// that: it does not change lse.
template <int C>
FASTATTN_ONCE void weights(const Params& params, int64_t n, const Floats (&m)[C], const float* z_t, float* p_t,
                           Floats (&l)[C]) {
  const float on_score_log2 = params.on_score_log2(), headroom = headroom_log2(params);
  Floats reference[C], sum[C];
  for (int c = 0; c < C; ++c) {
    reference[c] = m[c] == -kInfinity ? Floats{} : m[c];  // finite_max
    sum[c] = Floats{};
  }
  const auto each_key = [&](auto drops) {
    for (int64_t i = 0; i < n; i += kPerUnit) {
      Floats p[kPerUnit][C];
      each_vector(p, [&](Floats& x, int r, int c) {
        const int64_t at = ((i + r) * C + c) * kLanes;
        x = weight(load(p_t + at), reference[c], on_score_log2, headroom);
        sum[c] += x;
        if (drops) x *= load(z_t + at);
      });
      store_right(p_t, i, p);
    }
  };
  z_t ? each_key(std::true_type{}) : each_key(std::false_type{});
  for (int c = 0; c < C; ++c) l[c] += sum[c];
}

// Vectors first, ..., first + C - 1 of a block of queries against a part of a block of keys.
template <int C>
void attend(const Params& p, int64_t b, int64_t h, const KeyBlock& keys, Part part, const QueryBlock& queries,
            int first, ForwardBlock& block, Prefetch& prefetch, const ForwardScratch& w) {
  const float on_score_log2 = p.on_score_log2();
  const Target o_t{block.o_t + first * kLanes, block.stride};
  Floats m[C], l[C], decay[C];
  for (int c = 0; c < C; ++c) m[c] = block.m[first + c], l[c] = block.l[first + c];

  const Right q_t{block.q_t + first * kLanes, block.stride};
  prefetch.step();
  assign_product<C>(w.p_t, part.n, steps_over(p.d_qk), keys.k.at_row(part.begin), q_t);
  finish_scores(C, p, b, h, queries, keys, part, w.p_t);
  Ints begun = {};  // else O is 0 still
  for (int c = 0; c < C; ++c) begun |= m[c] != -kInfinity;
  if (follow_maximum<C>(part.n, w.p_t, on_score_log2, m, decay) && any(begun)) {
    for (int c = 0; c < C; ++c) l[c] *= decay[c];
    for (int64_t d = 0; d < p.d_v; ++d) {
      for (int c = 0; c < C; ++c) store(o_t.at(d, c), load(o_t.at(d, c)) * decay[c]);
    }
  }
  if (p.dropout.drops) dropout_factors(C, p.dropout, b, h, queries, keys, part, w.z_t);
  weights<C>(p, part.n, m, p.dropout.drops ? w.z_t : nullptr, w.p_t, l);
  prefetch.step();
  add_product<C>(o_t, p.d_v, part.n / kPerUnit, keys.v_t.at_step(part.begin / kPerUnit), PackedRight<C>{w.p_t});

  for (int c = 0; c < C; ++c) block.m[first + c] = m[c], block.l[first + c] = l[c];
}

// Prepares a block of queries.
void begin_block(int C, const Params& p, int64_t b, int64_t h, ForwardBlock& block, const ForwardScratch& w) {
  const int64_t M = C * kLanes;
  block.stride = M;
  const Rows q = rows_of(p.q, b, h, p.queries[b], block.queries.first, block.queries.n, M, p.d_qk, true, w.q);
  transpose_queries(q, M, units(p.d_qk), split_scale(p.scale).on_query, block.q_t, M);
  for (int c = 0; c < C; ++c) block.m[c] = splat(-kInfinity), block.l[c] = Floats{};
  __builtin_memset(block.o_t, 0, M * padded(p.d_v) * sizeof(float));
}

// The lse of all lanes, from the score m whose weight is 1 and the sum l of the weights, which have no headroom.
FASTATTN_INLINE void lse_of_lanes(int C, const Floats* m, const Floats* l, float on_score_log2, float* lse) {
  for (int c = 0; c < C; ++c) {
    const Floats log2_of_l = log2(l[c]);
    for (int i = 0; i < kLanes; ++i) {
      lse[c * kLanes + i] = static_cast<float>(lse_of(m[c][i], on_score_log2, log2_of_l[i]));
    }
  }
}

// Computes the factor of the output and the lse, takes the headroom of the weights out of l, and adds that of the sink.
FASTATTN_ONCE void finish_softmax(int C, const Params& p, int64_t h, const Floats* m, Floats* l, Floats* on_o,
                                  float* lse) {
  const float on_score_log2 = p.on_score_log2();
  for (int c = 0; c < C; ++c) {
    on_o[c] = l[c] == 0.0f ? Floats{} : 1.0f / l[c];  // one_over_sum
    l[c] *= exp2(splat(headroom_log2(p)));
  }
  lse_of_lanes(C, m, l, on_score_log2, lse);
  for (int64_t i = 0; p.sinks && i < C * kLanes; ++i) {
    const int64_t c = i / kLanes, lane = i % kLanes;
    const BesideSink row = beside_sink(lse_of(m[c][lane], on_score_log2, log2(l[c])[lane]), p.sinks[h]);
    lse[i] = static_cast<float>(row.lse);
    l[c][lane] /= static_cast<float>(row.share);
    on_o[c][lane] *= static_cast<float>(row.share);
  }
}

// Writes the lse of a block of queries, and its measures if they are wanted.
FASTATTN_ONCE void write_statistics(const Params& p, const ForwardOutputs& out, int64_t b, int64_t h,
                                    const QueryBlock& queries, const Floats* m, const Floats* l, const float* lse) {
  for (int64_t i = 0; i < queries.n; ++i) {
    const int64_t row = (b * p.H + h) * p.n_q + p.queries[b].at(queries.first + i);
    out.lse[row] = lse[i];
    if (out.measures) {
      const int64_t c = i / kLanes, lane = i % kLanes;
      out.measures[row] = Measure::of(m[c][lane], l[c][lane], p.on_score_log2());
    }
  }
}

// Writes the output and lse of a block of queries.
void end_block(int C, const Params& p, const ForwardOutputs& out, int64_t b, int64_t h, const ForwardBlock& block) {
  const int64_t M = C * kLanes, n = block.queries.n, d_v = p.d_v;
  Floats l[kColumns], on_o[kColumns];
  for (int c = 0; c < C; ++c) l[c] = block.l[c];
  float lse[kBlockQueries];
  finish_softmax(C, p, h, block.m, l, on_o, lse);
  with_elements(out.o.row(b, h, 0), out.o.dtype, [&](auto* o) {
    decltype(o) rows[kBlockQueries];
    for (int64_t i = 0; i < n; ++i) rows[i] = o + p.queries[b].at(block.queries.first + i) * out.o.row_stride;
    transpose(
        padded(d_v), M,
        [&](int64_t d, int64_t i) {
          const Floats x = load(block.o_t + d * M + i) * on_o[i / kLanes];
          return l[i / kLanes] == 0.0f ? Floats{} : x;  // not 0 times a NaN that other queries see
        },
        [&](int64_t i, int64_t d, Floats x) {
          if (i < n) narrow_lanes(rows[i] + d, x, d_v - d);
        });
  });
  write_statistics(p, out, b, h, block.queries, block.m, l, lse);
}

// Writes zeros for those of the queries first, ..., last - 1 that are padding.
void write_padding(const Params& p, const ForwardOutputs& out, int64_t b, int64_t h, int64_t first, int64_t last) {
  const IndexList& queries = p.queries[b];
  if (queries.count == p.n_q) return;
  for (int64_t query = first; query < last; ++query) {
    if (queries.contains(query)) continue;
    zero_row(out.o, b, h, query, p.d_v);
    out.lse[(b * p.H + h) * p.n_q + query] = -kInfinity;
  }
}

// A prefetch of what the next item reads, but for keys and values that this one reads too.
Prefetch prefetch_for(const Params& p, const ForwardOutputs& out, const ForwardItem& item, const ForwardItem* next) {
  Prefetch prefetch;
  if (!next) return prefetch;
  const auto [b, h, first_query, last_query] = *next;
  const IndexList &queries = p.queries[b], &keys = p.keys[b];
  const int64_t h_kv = h / p.group(), first = queries.lower_bound(first_query), last = queries.lower_bound(last_query);
  if (first == last) return prefetch;
  prefetch.add(p.q, b, h, queries, first, last, p.d_qk);
  prefetch.add(out.o, b, h, queries, first, last, p.d_v);
  if (p.isolated_runs || b != item.b || h_kv != item.h / p.group()) {
    const KeyRange seen = p.visible_to_some(b, h, queries.at(first), queries.at(last - 1));
    const int64_t first_key = keys.lower_bound(seen.begin), last_key = keys.lower_bound(seen.end);
    prefetch.add(p.k, b, h_kv, keys, first_key, last_key, p.d_qk);
    prefetch.add(p.v, b, h_kv, keys, first_key, last_key, p.d_v);
  }
  constexpr int64_t kProducts = 2;
  prefetch.spread(kProducts * pairs_of_blocks(p, item.b, item.first_query, item.last_query, 0, p.keys[item.b].count));
  return prefetch;
}

// At most kStripQueries queries of an isolated run against all keys they see.
void forward_strip(const Params& p, const ForwardOutputs& out, int64_t b, int64_t h, const IsolatedRun& isolated_run,
                   int64_t first_query, int64_t last_query, Prefetch& prefetch, const ForwardScratch& w) {
  ForwardBlock blocks[kStripBlocks];
  int64_t count = 0;
  KeyRange seen{p.n_k, 0};  // by any of them
  for (int64_t first = first_query; first < last_query; first += kBlockQueries, ++count) {
    ForwardBlock& block = blocks[count];
    block.queries.init(p, b, h, p.queries[b], isolated_run, first, lesser(kBlockQueries, last_query - first));
    block.q_t = w.q_t + count * kBlockQueries * units(p.d_qk);
    block.o_t = w.o_t + count * kBlockQueries * padded(p.d_v);
    seen = hull(seen, block.queries.range.some);
    begin_block(columns_of(block.queries.n), p, b, h, block, w);
  }

  KeyBlock keys[kChunkBlocks];
  const IndexList& list = p.keys[b];
  const int64_t origin = list.lower_bound(isolated_run.keys.begin), last_key = list.lower_bound(isolated_run.keys.end);
  const int64_t size = block_keys(p);
  each_key_chunk(list, seen, origin, last_key, w.chunk_blocks * size, size, [&](int64_t begin, int64_t chunk_end) {
    int64_t n_key_blocks = 0;
    for (int64_t i = begin; i < chunk_end; i += size, ++n_key_blocks) {
      keys[n_key_blocks] = key_block(p, b, h / p.group(), i, lesser(size, chunk_end - i), w, n_key_blocks);
    }
    for (int64_t j = 0; j < count; ++j) {
      for (int64_t i = 0; i < n_key_blocks; ++i) {
        each_visible_part(p, b, h, p.queries[b], blocks[j].queries, keys[i],
                          [&](int vectors, const QueryBlock& queries, int first, Part part) {
                            with_columns(vectors, [&](auto C) {
                              attend<C>(p, b, h, keys[i], part, queries, first, blocks[j], prefetch, w);
                            });
                          });
      }
    }
  });
  for (int64_t j = 0; j < count; ++j) {
    end_block(columns_of(blocks[j].queries.n), p, out, b, h, blocks[j]);
  }
}

#if !FASTATTN_BF16
void attend_single_block(const Params& p, const ForwardOutputs& out, int64_t b, int64_t h,
                         const IsolatedRun& isolated_run, int64_t first, int64_t last, Prefetch& prefetch,
                         const ForwardScratch& w, float* sums = nullptr);
#endif

void forward(const Params& p, const ForwardOutputs& out, const ForwardItem& item, const ForwardItem* next,
             float* scratch) {
  const ForwardScratch w(p, scratch);
  [[maybe_unused]] const MultiplierInUse multiplier;
  const auto [b, h, first_query, last_query] = item;
  write_padding(p, out, b, h, first_query, lesser(last_query, p.n_q));
  Prefetch prefetch = prefetch_for(p, out, item, next);
  each_isolated_run(
      p, b, p.queries[b], first_query, last_query, [&](const IsolatedRun& isolated_run, int64_t first, int64_t last) {
#if !FASTATTN_BF16
        if (fits_single_block(p, b, isolated_run))
          return attend_single_block(p, out, b, h, isolated_run, first, last, prefetch, w);
#endif
        for (; first < last; first += kStripQueries) {
          forward_strip(p, out, b, h, isolated_run, first, lesser(first + kStripQueries, last), prefetch, w);
        }
      });
}

int64_t forward_scratch(const Params& p) { return ForwardScratch(p, nullptr).size; }

}  // namespace
}  // namespace fastattn::FASTATTN_ISA

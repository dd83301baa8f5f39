// The weights themselves, P = 2^(S - lse), recomputed from lse as in backward.h, block by block and transposed as
// there: averaged over heads, summed over queries, or the largest of each query. Only what the caller asks for is ever
// in memory for all pairs.
//
// The Measure of a query comes from the forward pass, or from its lse (`measure`), which may have to be refined: once,
// in whatever parts the keys are visited after that.
#pragma once

#include <cstdint>

#include "arith.h"
#include "backward.h"
#include "blocks.h"
#include "dropout.h"
#include "matrix.h"
#include "microkernel.h"
#include "params.h"
#include "rows.h"
#include "vector.h"

namespace fastattn::FASTATTN_ISA {
namespace {

// Keys whose sums stay in the L2 cache.
constexpr int64_t kSummedKeys = 1024 / kBlockKeys * kBlockKeys;
static_assert(kSummedKeys % kLanes == 0);

struct WeightsScratch {
  float *q, *q_t;       // [M, d] and [d, M]
  float* k;             // a copy of a block of keys, where it is needed
  float *s_t, *z_t;     // [kBlockKeys, M]
  int64_t summed_keys;  // kSummedKeys, or fewer where there are fewer keys
  float* sums;          // [summed_keys, M], or [summed_keys, kLanes] where queries are summed
  float* rows;          // [kLanes, summed_keys], or [summed_keys, kLanes]
  float* largest;       // [M, top_k], descending
  int32_t* their_keys;  // [M, top_k]
  int64_t size;

  WeightsScratch(const Params& p, int64_t top_k, float* base) {
    constexpr int64_t M = kBlockQueries;
    Arena arena(base);
    q = arena.take(M * units(p.d_qk));
    q_t = arena.take(M * units(p.d_qk));
    k = arena.take(kBlockKeys * units(p.d_qk));
    s_t = arena.take(kBlockKeys * M);
    z_t = arena.take(p.dropout.drops ? kBlockKeys * M : 0);
    summed_keys = lesser(kSummedKeys, padded(up_to_grain(p.n_k)));
    sums = arena.take(summed_keys * M);
    rows = arena.take(summed_keys * kLanes);
    largest = arena.take(M * top_k);
    their_keys = reinterpret_cast<int32_t*>(arena.take(M * top_k));
    size = arena.used();
  }
};

// Computes the Measure of the queries numbered first_query, ..., last_query - 1 from their lse.
void measure(const Params& p, const float* lse, const WeightsItem& item, Measure* measures, float* scratch) {
  const BackwardScratch w(p, scratch);
  [[maybe_unused]] const MultiplierInUse multiplier;
  const int64_t b = item.b, last_query = lesser(item.last_query, p.n_q);
  BackwardTensors t{};
  t.lse = lse;
  for (int64_t h = item.first_head; h < item.last_head; ++h) {
    Measure* const of_head = measures + (b * p.H + h) * p.n_q;
    for (int64_t query = item.first_query; query < last_query; ++query) of_head[query] = {0, 0};  // all it sees is -inf
    BackwardItem as_backward{};
    as_backward.b = b;
    const IndexList queries = contributing_queries(p, t, b, h, item.first_query, last_query, w.queries);
    for (int64_t first = 0; first < queries.count; first += kBlockQueries) {
      BackwardBlock block;
      w.place_block(p, 0, block);
      block.queries.init(p, b, h, queries, first, lesser(kBlockQueries, queries.count - first));
      begin_block(columns_of(block.queries.n), p, t, as_backward, h, queries, block, w);
      for (int64_t lane = 0; lane < block.queries.n; ++lane) {
        const int64_t c = lane / kLanes, l = lane % kLanes;
        of_head[queries.at(first + lane)] = {block.reference[c][l], block.rest_log2[c][l]};
      }
    }
  }
}

// Prepares a block of queries for `each_block_of_scores`. The weights of lanes without a query are 0.
void begin_weights(int C, const Params& p, int64_t b, int64_t h, const Measure* measures, BackwardBlock& block,
                   const WeightsScratch& w) {
  const int64_t M = C * kLanes;
  const Rows q = rows_of(p.q, b, h, p.queries[b], block.queries.first, block.queries.n, M, p.d_qk, true, w.q);
  block.q = {q.data, q.stride}, block.q_t = w.q_t, block.stride = M;
  transpose_queries(q, M, units(p.d_qk), split_scale(p.scale).on_query, block.q_t, M);
  for (int64_t lane = 0; lane < M; ++lane) {
    const int64_t c = lane / kLanes, l = lane % kLanes;
    const Measure& from = measures[(b * p.H + h) * p.n_q + block.queries.index[c][l]];
    block.reference[c][l] = from.reference;
    block.rest_log2[c][l] = lane < block.queries.n ? from.rest_log2 : kInfinity;
  }
}

// Calls visit(keys, part), with S^T of that part of a block of keys in the scratch, for all blocks that the queries see
// at the places first_key, ..., last_key - 1.
template <class Visit>
FASTATTN_INLINE void each_block_of_scores(int C, const Params& p, int64_t b, int64_t h, const BackwardBlock& block,
                                          int64_t first_key, int64_t last_key, const WeightsScratch& w, Visit visit) {
  const IndexList& list = p.keys[b];
  each_key_block(list, block.queries.range.some, 0, first_key, last_key, kBlockKeys, [&](int64_t first, int64_t n) {
    KeyBlock keys{&list, first, n, {}, {}, {}, {}};
    keys.k = rows_of(p.k, b, h / p.group(), list, first, n, up_to_grain(n), p.d_qk, is_for_few(p), w.k);
    const Part part = visible_part(block.queries.range.some, keys);
    if (part.n == 0) return;
    scores(C, p, b, h, keys, part, block.queries, block, 0, w.s_t);
    visit(keys, part);
  });
}

// Keys at the places first, ..., last - 1 of a list, and the columns of the output that belong to them: theirs, and
// those of padding up to the next ones.
struct Chunk {
  int64_t first, last, first_column, last_column;

  Chunk(const IndexList& list, int64_t n_k, int64_t first)
      : first(first),
        last(lesser(first + kSummedKeys, list.count)),
        first_column(first == 0 ? 0 : list.at(first)),
        last_column(last == list.count ? n_k : list.at(last)) {}

  int64_t n() const { return last - first; }
};

// run(chunk) for all of the keys, and once where there are none but padding.
template <class Run>
FASTATTN_INLINE void each_chunk(const IndexList& list, int64_t n_k, Run run) {
  int64_t first = 0;
  do {
    run(Chunk(list, n_k, first));
    first += kSummedKeys;
  } while (first < list.count);
}

// sums += Z^T * P^T, for the keys of a chunk.
void add_weights(int C, const Params& p, int64_t b, int64_t h, const BackwardBlock& block, const Chunk& chunk,
                 const WeightsScratch& w) {
  const float on_score_log2 = p.on_score_log2();
  each_block_of_scores(C, p, b, h, block, chunk.first, chunk.last, w, [&](const KeyBlock& keys, Part part) {
    if (p.dropout.drops) dropout_factors(C, p.dropout, b, h, block.queries, keys, part, w.z_t);
    float* const to = w.sums + (keys.first - chunk.first + part.begin) * C * kLanes;
    for (int64_t i = 0; i < part.n; ++i) {
      for (int c = 0; c < C; ++c) {
        const int64_t at = (i * C + c) * kLanes;
        Floats x = weight_from_lse(block, c, load(w.s_t + at), on_score_log2);
        if (p.dropout.drops) x *= load(w.z_t + at);
        store(to + at, load(to + at) + x);
      }
    }
  });
}

// Writes the columns of a chunk from a row of its sums, times `factor`.
template <class Element>
FASTATTN_INLINE void write_columns(const IndexList& list, const Chunk& chunk, const float* sums, float factor,
                                   Element* row) {
  const bool side_by_side = chunk.n() > 0 && list.consecutive(chunk.first, chunk.n());
  if (!side_by_side || chunk.n() < chunk.last_column - chunk.first_column) {
    __builtin_memset(row + chunk.first_column, 0, (chunk.last_column - chunk.first_column) * sizeof(Element));
  }
  if (side_by_side) return narrow_row(sums, factor, chunk.n(), row + list.at(chunk.first));
  for (int64_t i = 0; i < chunk.n(); i += kLanes) {
    Element few[kLanes];
    narrow(few, load(sums + i) * factor);
    for (int64_t j = 0; j < lesser(kLanes, chunk.n() - i); ++j) row[list.at(chunk.first + i + j)] = few[j];
  }
}

// Writes the columns of a chunk for a block of queries.
void write_weights(int C, const Params& p, const Output& out, const WeightsItem& item, const QueryBlock& queries,
                   const Chunk& chunk, const WeightsScratch& w) {
  const float factor = 1.0f / static_cast<float>(item.last_head - item.first_head);
  for (int c = 0; c * kLanes < queries.n; ++c) {
    transpose(w.sums + c * kLanes, C * kLanes, padded(chunk.n()), kLanes, w.rows, w.summed_keys);
    for (int64_t lane = 0; lane < lesser(kLanes, queries.n - c * kLanes); ++lane) {
      char* const row = out.row(item.b, item.row_of_heads, queries.index[c][lane]);
      with_elements(row, out.dtype,
                    [&](auto* to) { write_columns(p.keys[item.b], chunk, w.rows + lane * w.summed_keys, factor, to); });
    }
  }
}

void zero_weights_of_padding(const Params& p, const Output& out, const WeightsItem& item) {
  for (int64_t query = item.first_query; query < lesser(item.last_query, p.n_q); ++query) {
    if (!p.queries[item.b].contains(query)) zero_row(out, item.b, item.row_of_heads, query, p.n_k);
  }
}

// The weights of the heads of an item, averaged.
void weights(const Params& p, const Measure* measures, const Output& out, const WeightsItem& item, float* scratch) {
  const WeightsScratch w(p, 0, scratch);
  [[maybe_unused]] const MultiplierInUse multiplier;
  const IndexList &queries = p.queries[item.b], &list = p.keys[item.b];
  zero_weights_of_padding(p, out, item);
  const int64_t end = lesser(item.last_query, queries.count);
  for (int64_t first = item.first_query; first < end; first += kBlockQueries) {
    const int64_t n = lesser(kBlockQueries, end - first);
    each_chunk(list, p.n_k, [&](const Chunk& chunk) {
      __builtin_memset(w.sums, 0, w.summed_keys * kBlockQueries * sizeof(float));
      BackwardBlock block;
      for (int64_t h = item.first_head; h < item.last_head; ++h) {
        block.queries.init(p, item.b, h, queries, first, n);
        begin_weights(columns_of(n), p, item.b, h, measures, block, w);
        add_weights(columns_of(n), p, item.b, h, block, chunk, w);
      }
      write_weights(columns_of(n), p, out, item, block.queries, chunk, w);
    });
  }
}

// sums[key, lane] += P of the queries in that lane.
void add_received(int C, const Params& p, const WeightsItem& item, const BackwardBlock& block, const Chunk& chunk,
                  const WeightsScratch& w) {
  const float on_score_log2 = p.on_score_log2();
  each_block_of_scores(C, p, item.b, item.first_head, block, chunk.first, chunk.last, w,
                       [&](const KeyBlock& keys, Part part) {
                         float* const to = w.sums + (keys.first - chunk.first + part.begin) * kLanes;
                         for (int64_t i = 0; i < part.n; ++i) {
                           Floats x = {};
                           for (int c = 0; c < C; ++c)
                             x += weight_from_lse(block, c, load(w.s_t + (i * C + c) * kLanes), on_score_log2);
                           store(to + i * kLanes, load(to + i * kLanes) + x);
                         }
                       });
}

// What the keys of an item, those of one chunk, receive from all queries of its head. They are summed strip by strip,
// so that the rounding errors of many queries do not pile up.
void received(const Params& p, const Measure* measures, float* out, const WeightsItem& item, float* scratch) {
  const WeightsScratch w(p, 0, scratch);
  [[maybe_unused]] const MultiplierInUse multiplier;
  const int64_t b = item.b, h = item.first_head;
  const IndexList &queries = p.queries[b], &list = p.keys[b];
  const Chunk chunk(list, p.n_k, item.first_key);
  float* const totals = w.rows;
  __builtin_memset(totals, 0, w.summed_keys * kLanes * sizeof(float));
  for (int64_t strip = 0; strip < queries.count; strip += kStripQueries) {
    const int64_t end = lesser(strip + kStripQueries, queries.count);
    __builtin_memset(w.sums, 0, w.summed_keys * kLanes * sizeof(float));
    for (int64_t first = strip; first < end; first += kBlockQueries) {
      BackwardBlock block;
      block.queries.init(p, b, h, queries, first, lesser(kBlockQueries, end - first));
      const int C = columns_of(block.queries.n);
      begin_weights(C, p, b, h, measures, block, w);
      add_received(C, p, item, block, chunk, w);
    }
    for (int64_t i = 0; i < chunk.n() * kLanes; i += kLanes) store(totals + i, load(totals + i) + load(w.sums + i));
  }
  float* const row = out + (b * p.H + h) * p.n_k;
  __builtin_memset(row + chunk.first_column, 0, (chunk.last_column - chunk.first_column) * sizeof(float));
  for (int64_t i = 0; i < chunk.n(); ++i) {
    float* const lanes = totals + i * kLanes;
    for (int step = kLanes / 2; step > 0; step /= 2) {
      for (int lane = 0; lane < step; ++lane) lanes[lane] += lanes[lane + step];
    }
    row[list.at(chunk.first + i)] = lanes[0];
  }
}

// The order of the largest weights: NaN comes first, as in torch.topk.
FASTATTN_INLINE Ints comes_before(Floats x, Floats y) { return (x > y) | ((x != x) & (y == y)); }
FASTATTN_INLINE bool comes_before(float x, float y) { return x > y || (x != x && y == y); }

constexpr float kNoWeight = -1;  // of a key that is not seen

// Puts a weight and its key where they belong among the largest; equal ones stay in the order of their keys.
FASTATTN_INLINE void insert(float weight, int32_t key, int64_t top_k, float* largest, int32_t* their_keys) {
  int64_t i = top_k - 1;
  for (; i > 0 && comes_before(weight, largest[i - 1]); --i) {
    largest[i] = largest[i - 1], their_keys[i] = their_keys[i - 1];
  }
  largest[i] = weight, their_keys[i] = key;
}

// Finds the largest weights of a block of queries.
void find_largest(int C, const Params& p, const WeightsItem& item, const BackwardBlock& block, int64_t top_k,
                  const WeightsScratch& w) {
  const float on_score_log2 = p.on_score_log2();
  for (int64_t i = 0; i < C * kLanes * top_k; ++i) w.largest[i] = kNoWeight, w.their_keys[i] = -1;
  Floats smallest[kColumns];  // of the largest of each query
  for (int c = 0; c < C; ++c) smallest[c] = splat(kNoWeight);
  each_block_of_scores(
      C, p, item.b, item.first_head, block, 0, p.keys[item.b].count, w, [&](const KeyBlock& keys, Part part) {
        for (int64_t i = 0; i < lesser(part.n, keys.n - part.begin); ++i) {
          for (int c = 0; c < C; ++c) {
            const Floats s = load(w.s_t + (i * C + c) * kLanes);
            const Floats x = s == -kInfinity ? splat(kNoWeight) : weight_from_lse(block, c, s, on_score_log2);
            const Ints enters = comes_before(x, smallest[c]);
            if (!any(enters)) continue;
            for (int lane = 0; lane < kLanes; ++lane) {
              if (!enters[lane]) continue;
              const int64_t at = (c * kLanes + lane) * top_k;
              insert(x[lane], static_cast<int32_t>(keys.key(part.begin + i)), top_k, w.largest + at, w.their_keys + at);
              smallest[c][lane] = w.largest[at + top_k - 1];
            }
          }
        }
      });
}

// The largest weights of the queries of an item, which has one head, and their keys.
void top_keys(const Params& p, const Measure* measures, const TopKeysOutputs& out, const WeightsItem& item,
              float* scratch) {
  const WeightsScratch w(p, out.top_k, scratch);
  [[maybe_unused]] const MultiplierInUse multiplier;
  const int64_t b = item.b, h = item.first_head;
  const IndexList& queries = p.queries[b];
  const auto write = [&](int64_t query, const float* largest, const int32_t* their_keys) {
    const int64_t row = ((b * p.H + h) * p.n_q + query) * out.top_k;
    for (int64_t i = 0; i < out.top_k; ++i) {
      const bool found = largest && their_keys[i] >= 0;
      out.weights[row + i] = found ? largest[i] : 0.0f;
      out.keys[row + i] = found ? their_keys[i] : -1;
    }
  };
  for (int64_t query = item.first_query; query < lesser(item.last_query, p.n_q); ++query) {
    if (!queries.contains(query)) write(query, nullptr, nullptr);
  }
  const int64_t end = lesser(item.last_query, queries.count);
  for (int64_t first = item.first_query; first < end; first += kBlockQueries) {
    BackwardBlock block;
    block.queries.init(p, b, h, queries, first, lesser(kBlockQueries, end - first));
    const int C = columns_of(block.queries.n);
    begin_weights(C, p, b, h, measures, block, w);
    find_largest(C, p, item, block, out.top_k, w);
    for (int64_t i = 0; i < block.queries.n; ++i) {
      write(queries.at(first + i), w.largest + i * out.top_k, w.their_keys + i * out.top_k);
    }
  }
}

int64_t weights_scratch(const Params& p, int64_t top_k) { return WeightsScratch(p, top_k, nullptr).size; }

#if FASTATTN_BF16
int64_t joint_scratch(const Params&) { return 0; }
constexpr decltype(WeightsKernels::attend) attend_with_weights = nullptr;
#else
int64_t joint_scratch(const Params& p);
void attend_with_weights(const Params& p, const ForwardOutputs& out, const Output& weights, const WeightsItem& item,
                         float* scratch);
#endif

const WeightsKernels weights_kernels = {kSummedKeys, measure,  weights_scratch, weights,
                                        received,    top_keys, joint_scratch,   attend_with_weights};

}  // namespace
}  // namespace fastattn::FASTATTN_ISA

// Backward: the heads that share keys and values, strip by strip of queries as in forward.h, with P recomputed from lse
// (Dao et al. 2022, algorithm 4), transposed. delta = rowsum(dO * O); the gradient of lse is P.
//
//   S^T = K Q^T    P^T = 2^(S^T - lse)    dP^T = V dO^T    dS^T = P^T * (dP^T - delta + dlse)
//   dV += P^T dO   dK += dS^T Q           dQ^T += K^T dS^T
//
// Dropout multiplies the weights by Z, which changes two of these: dP^T = Z^T * V dO^T, and dV += (Z^T * P^T) dO.
//
// An item owns the gradients it writes, and sums each over all of its queries or over all of its keys, in order: no
// atomics, and the same bits however the work is split.

namespace fastattn::FASTATTN_ISA {
namespace {

// Keys whose dK and dV stay in the L2 cache while every strip of queries adds to them.
int64_t cached_keys(const Problem& p) {
  constexpr int64_t kCacheFloats = (512 << 10) / sizeof(float);
  const int64_t blocks = kCacheFloats / greater(1, padded(p.d_qk) + padded(p.d_v)) / kBlockKeys;
  return greater(1, lesser(blocks, (p.n_k + kBlockKeys - 1) / kBlockKeys)) * kBlockKeys;
}

// A block of queries on its way over the keys. Per lane, what turns S into P and dP into dS: lse is the sum of two
// floats (rounded to one, it would double the error of P), one that S is measured from, and a rest.
struct BackwardBlock {
  QueryBlock queries;
  float *q_copy, *d_o_copy;    // rows
  float *q_t, *d_o_t;          // [d, M], for the sums over the head dim
  float *q_right, *d_o_right;  // for the sums over the queries, where rows do not serve
  Right q, d_o;                // the same, wherever they are
  float* dq_t;                 // [d_qk, M]
  Floats reference[kColumns], rest_log2[kColumns], delta[kColumns], d_lse[kColumns];
  Floats d_slope[kColumns];
};

struct BackwardScratch {
  float *o, *o_t, *d_o, *d_o_t;  // fp32 [M, d_v] and its transpose
  float *k, *v, *k_t;            // copies of a block of keys, where they are needed
  float *s_t, *dp_t, *z_t;       // [kBlockKeys, M]
  float *weights, *ds, *ds_t;    // Z^T * P^T and dS^T as left factors, and dS^T as a right one
  float* dq;                     // [M, d_qk]
  float *dk, *dv;                // [cached_keys, d]
  int32_t* queries;              // [n_q]
  float* strip;                  // what its blocks point to
  int64_t size;

  BackwardScratch(const Problem& p, float* base) {
    constexpr int64_t M = kColumns * kLanes;
    Arena arena(base);
    o = arena.take(M * padded(p.d_v));
    o_t = arena.take(M * padded(p.d_v));
    d_o = arena.take(M * padded(p.d_v));
    d_o_t = arena.take(M * padded(p.d_v));
    k = arena.take(kBlockKeys * units(p.d_qk));
    v = arena.take(kBlockKeys * units(p.d_v));
    k_t = arena.take(transposed_size(kBlockKeys, p.d_qk));
    s_t = arena.take(kBlockKeys * M);
    dp_t = arena.take(kBlockKeys * M);
    z_t = arena.take(p.dropout.drops ? kBlockKeys * M : 0);
    weights = s_t, ds = dp_t;  // in place, which both forms allow
    ds_t = kOneForm ? ds : arena.take(kBlockKeys * M / kPerUnit);
    dq = arena.take(M * padded(p.d_qk));
    dk = arena.take(cached_keys(p) * padded(p.d_qk));
    dv = arena.take(cached_keys(p) * padded(p.d_v));
    queries = reinterpret_cast<int32_t*>(arena.take(p.n_q));
    strip = arena.take(0);
    BackwardBlock block;
    for (int64_t i = 0; i < kStripQueries; i += block_queries(p)) take_block(p, arena, block);
    size = arena.used();
  }

  // Points to the memory of block i of a strip.
  void place_block(const Problem& p, int64_t i, BackwardBlock& block) const {
    Arena arena(strip);
    for (int64_t j = 0; j <= i; ++j) take_block(p, arena, block);
  }

 private:
  static void take_block(const Problem& p, Arena& arena, BackwardBlock& block) {
    const int64_t M = block_queries(p);
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

// The queries of an item that have a gradient: the real ones that see something (lse > -inf, or NaN).
IndexList contributing_queries(const Problem& p, const BackwardTensors& t, const BackwardItem& item, int64_t h,
                               int32_t* table) {
  const IndexList& real = p.queries[item.b];
  const float* lse = t.lse + (item.b * p.H + h) * p.n_q;
  int64_t count = 0;
  const int64_t end = real.lower_bound(item.last_query);
  for (int64_t i = real.lower_bound(item.first_query); i < end; ++i) {
    const int64_t query = real.at(i);
    if (lse[query] != -kInfinity) table[count++] = static_cast<int32_t>(query);
  }
  return {table, 0, count};
}

// P of vector c of the queries from S. The difference first: see weight of single.h. It is above 1 by rounding only, and
// an lse of 1e9 takes it far.
FASTATTN_INLINE Floats weight_again(const BackwardBlock& block, int c, Floats s, float on_score_log2) {
  return exp2(at_most((s - block.reference[c]) * on_score_log2 - block.rest_log2[c], 64.0f));
}

// Writes S^T of a part of the keys, hidden ones -inf.
template <int C>
FASTATTN_INLINE void scores(const Problem& p, int64_t b, int64_t h, const BackwardBlock& block, const KeyBlock& keys,
                            Part part, float* s_t) {
  constexpr int64_t M = C * kLanes;
  assign_product<C>({s_t, M}, part.n, steps_over(p.d_qk), keys.k.at_row(part.begin), {block.q_t, M});
  finish_scores<C>(p, b, h, block.queries, keys, part, s_t);
}

// An lse of 1000 is rounded by up to 3e-5, and every weight of its row is off by that factor. The weights of a row sum
// to 1: what they sum to here tells the factor.
template <int C>
void refine_lse(const Problem& p, int64_t b, int64_t h, const bool* imprecise, BackwardBlock& block,
                const BackwardScratch& w) {
  const IndexList& list = p.keys[b];
  const float on_score_log2 = p.on_score_log2();
  Floats sum[C] = {};
  each_key_block(list, block.queries.range.some, 0, list.count, [&](int64_t first, int64_t n) {
    KeyBlock keys{&list, first, n, {}, {}, {}, {}};
    keys.k = rows_of(p.k, b, h / p.group(), list, first, n, up_to_grain(n), p.d_qk, false, w.k);
    const Part part = visible_part(block.queries, keys);
    scores<C>(p, b, h, block, keys, part, w.s_t);
    for (int64_t i = 0; i < part.n; ++i) {
      for (int c = 0; c < C; ++c) sum[c] += weight_again(block, c, load(w.s_t + (i * C + c) * kLanes), on_score_log2);
    }
  });
  for (int lane = 0; lane < C * kLanes; ++lane) {
    if (imprecise[lane]) block.rest_log2[lane / kLanes][lane % kLanes] += log2f(sum[lane / kLanes][lane % kLanes]);
  }
}

// Sums delta as dP is summed in fp32, in the same order: a query that sees a single key, where O = V, then has dS = 0
// to the bit.
template <int C>
void sum_delta(const Problem& p, const float* o_t, const float* d_o_t, BackwardBlock& block) {
  for (int c = 0; c < C; ++c) block.delta[c] = Floats{};
  for (int64_t begin = 0; begin < p.d_v; begin += kPartOfHeadDim) {
    Floats part[C] = {};
    for (int64_t d = begin; d < lesser(begin + kPartOfHeadDim, p.d_v); ++d) {
      for (int c = 0; c < C; ++c) {
        const int64_t at = (d * C + c) * kLanes;
        part[c] += load(o_t + at) * load(d_o_t + at);
      }
    }
    for (int c = 0; c < C; ++c) block.delta[c] += part[c];
  }
}

// Makes a block of queries ready.
template <int C>
void begin_block(const Problem& p, const BackwardTensors& t, const BackwardItem& item, int64_t h,
                 const IndexList& queries, BackwardBlock& block, const BackwardScratch& w) {
  constexpr int64_t M = C * kLanes;
  const int64_t b = item.b, first = block.queries.first, n = block.queries.n, row_of_head = (b * p.H + h) * p.n_q;
  const float on_query = split_scale(p.scale).on_query;

  const Rows q = rows_of(p.q, b, h, queries, first, n, M, p.d_qk, true, block.q_copy);
  transpose(q.data, q.stride, M, units(p.d_qk), block.q_t, M, [&](Floats x) { return times_on_query(x, on_query); });
  block.q = over_queries(q, M, p.d_qk, block.q_right);
  const int64_t n_d_o = t.d_o.data ? n : 0;  // else all zeros
  const Rows d_o = rows_of(t.d_o, b, h, queries, first, n_d_o, M, p.d_v, true, block.d_o_copy);
  transpose(d_o.data, d_o.stride, M, units(p.d_v), block.d_o_t, M, Unchanged{});
  block.d_o = over_queries(d_o, M, p.d_v, block.d_o_right);
  if (item.wants_dq) __builtin_memset(block.dq_t, 0, M * padded(p.d_qk) * sizeof(float));
  for (int c = 0; c < C; ++c) block.d_slope[c] = Floats{};

  const auto floats_transposed = [&](const Input& x, float* rows, float* to) {
    read_rows(x, b, h, queries, first, n_d_o, p.d_v, rows);
    __builtin_memset(rows + n_d_o * padded(p.d_v), 0, (M - n_d_o) * padded(p.d_v) * sizeof(float));
    transpose(rows, padded(p.d_v), M, padded(p.d_v), to, M, Unchanged{});
  };
  floats_transposed(t.o, w.o, w.o_t);
  if (!kOneForm) floats_transposed(t.d_o, w.d_o, w.d_o_t);
  sum_delta<C>(p, w.o_t, kOneForm ? block.d_o_t : w.d_o_t, block);

  bool imprecise[M], any_imprecise = false;  // query by query: the others in a block must not matter
  for (int64_t i = 0; i < M; ++i) {
    const int64_t query = row_of_head + queries.at(first + lesser(i, n - 1)), c = i / kLanes, lane = i % kLanes;
    const Measure from = Measure::of(t.lse[query] * p.scores_per_nat(), p.on_score_log2());
    imprecise[i] = std::fabs(t.lse[query]) > precise_lse(p.q.dtype) ||
                   (p.q.dtype == DType::f32 && block.queries.length[c][lane] <= kFewKeys);
    any_imprecise |= imprecise[i];
    block.reference[c][lane] = from.reference, block.rest_log2[c][lane] = from.rest_log2;
    block.d_lse[c][lane] = t.d_lse ? t.d_lse[query] : 0.0f;
  }
  if (any_imprecise) refine_lse<C>(p, b, h, imprecise, block, w);
}

// Turns S^T and dP^T [n, M] into Z^T * P^T and dS^T, in the forms that the sums take.
template <int C>
FASTATTN_INLINE void gradients_of_scores(int64_t n, const BackwardBlock& block, float on_score_log2, bool drops,
                                         const BackwardScratch& w) {
  Floats d_lse_minus_delta[C];
  for (int c = 0; c < C; ++c) d_lse_minus_delta[c] = block.d_lse[c] - block.delta[c];
  for (int64_t i = 0; i < n; i += kPerUnit) {
    Floats weights[kPerUnit][C], ds[kPerUnit][C];
    each_vector(weights, [&](Floats& p, int r, int c) {
      const int64_t at = ((i + r) * C + c) * kLanes;
      p = weight_again(block, c, load(w.s_t + at), on_score_log2);
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
template <int C>
FASTATTN_INLINE void accumulate_rows(const float* a, int64_t n, int64_t n_queries, Right y, int64_t d, float* x) {
  constexpr int64_t M = C * kLanes;
  const Rows left{a, M / kPerUnit};
  each_column_tile(padded(d), [&](auto vectors, int64_t column) {
    const Target to{x + column, padded(d)};
    add_product<vectors>(to, n, query_steps(n_queries, M), left, y.at_column(column));
  });
}

// A block of queries against a block of keys. dk and dv are the rows of the first key of the block.
template <int C>
void add_gradients(const Problem& p, const BackwardTensors& t, const BackwardItem& item, int64_t h,
                   const KeyBlock& keys, BackwardBlock& block, float* dk, float* dv, const BackwardScratch& w) {
  constexpr int64_t M = C * kLanes;
  const Part part = visible_part(block.queries, keys);
  if (part.n == 0) return;
  if (p.dropout.drops) dropout_factors<C>(p.dropout, item.b, h, block.queries, keys, part, w.z_t);
  scores<C>(p, item.b, h, block, keys, part, w.s_t);
  assign_product<C>({w.dp_t, M}, part.n, steps_over(p.d_v), keys.v.at_row(part.begin), {block.d_o_t, M});
  gradients_of_scores<C>(part.n, block, p.on_score_log2(), p.dropout.drops, w);
  if (item.wants_d_added) {
    const auto* ds = reinterpret_cast<const LeftElement*>(w.ds);
    if (t.d_score) add_d_score<C>(p, t, item.b, h, block.queries, keys, part, ds);
    if (t.d_slope) add_d_slope<C>(p, item.b, block.queries, keys, part, ds, block.d_slope);
  }
  if (item.wants_dq) {
    const Transposed k_t = keys.k_t.at_step(part.begin / kPerUnit);
    add_product<C>({block.dq_t, M}, p.d_qk, part.n / kPerUnit, k_t, Right{w.ds_t, M});
  }
  if (item.wants_dkv) {
    const int64_t n = block.queries.n;
    accumulate_rows<C>(w.weights, part.n, n, block.d_o, p.d_v, dv + part.begin * padded(p.d_v));
    accumulate_rows<C>(w.ds, part.n, n, block.q, p.d_qk, dk + part.begin * padded(p.d_qk));
  }
}

// Adds dQ^T, times scale, to the rows of the output.
template <int C>
void add_dq(const Problem& p, const BackwardTensors& t, int64_t b, int64_t h, const IndexList& queries,
            const BackwardBlock& block, const BackwardScratch& w) {
  constexpr int64_t M = C * kLanes;
  const int64_t d_qk = padded(p.d_qk);
  const auto scale = static_cast<float>(p.scale);
  transpose(block.dq_t, M, d_qk, M, w.dq, d_qk, [&](Floats x) { return x * scale; });
  for (int64_t i = 0; i < block.queries.n; ++i) {
    float* dq = reinterpret_cast<float*>(t.dq.row(b, h, queries.at(block.queries.first + i)));
    for (int64_t d = 0; d < p.d_qk; ++d) dq[d] += w.dq[i * d_qk + d];
  }
}

// A strip of contributing queries of one head against the keys of a chunk.
void add_gradients_of_strip(const Problem& p, const BackwardTensors& t, const BackwardItem& item, int64_t h,
                            const IndexList& queries, int64_t first_query, int64_t chunk_begin, int64_t chunk_end,
                            const BackwardScratch& w) {
  const int64_t b = item.b, M = block_queries(p), end = lesser(first_query + kStripQueries, queries.count);
  const IndexList& list = p.keys[b];
  BackwardBlock blocks[kStripBlocks];
  int64_t count = 0;
  KeyRange seen{p.n_k, 0};  // by any of them
  for (int64_t first = first_query; first < end; first += M, ++count) {
    BackwardBlock& block = blocks[count];
    w.place_block(p, count, block);
    block.queries.init(p, b, h, queries, first, lesser(M, end - first));
    seen = {lesser(seen.begin, block.queries.range.some.begin), greater(seen.end, block.queries.range.some.end)};
    with_columns(block.queries.n, [&](auto C) { begin_block<C>(p, t, item, h, queries, block, w); });
  }

  each_key_block(list, seen, chunk_begin, chunk_end, [&](int64_t i, int64_t n) {
    KeyBlock keys{&list, i, n, {}, {}, {}, {}};
    keys.k = rows_of(p.k, b, item.h_kv, list, i, n, up_to_grain(n), p.d_qk, false, w.k);
    keys.v = rows_of(p.v, b, item.h_kv, list, i, n, up_to_grain(n), p.d_v, false, w.v);
    if (item.wants_dq) keys.k_t = transposed(keys.k, up_to_grain(n), p.d_qk, w.k_t);
    float* dk = w.dk + (i - chunk_begin) * padded(p.d_qk);
    float* dv = w.dv + (i - chunk_begin) * padded(p.d_v);
    for (int64_t j = 0; j < count; ++j) {
      with_columns(blocks[j].queries.n, [&](auto C) { add_gradients<C>(p, t, item, h, keys, blocks[j], dk, dv, w); });
    }
  });
  for (int64_t j = 0; item.wants_d_added && t.d_slope && j < count; ++j) {
    for (int64_t lane = 0; lane < blocks[j].queries.n; ++lane) {
      const int64_t query = queries.at(blocks[j].queries.first + lane);
      t.d_slope[(b * p.H + h) * p.n_q + query] += blocks[j].d_slope[lane / kLanes][lane % kLanes];
    }
  }
  for (int64_t j = 0; item.wants_dq && j < count; ++j) {
    with_columns(blocks[j].queries.n, [&](auto C) { add_dq<C>(p, t, b, h, queries, blocks[j], w); });
  }
}

// Writes dK and dV of the keys of a chunk, and zeros for the padding up to the next chunk.
void write_chunk(const Problem& p, const BackwardTensors& t, const BackwardItem& item, int64_t chunk_begin,
                 int64_t chunk_end, const BackwardScratch& w) {
  const IndexList& keys = p.keys[item.b];
  const int64_t begin = chunk_begin == 0 ? 0 : keys.at(chunk_begin);
  const int64_t end = chunk_end == keys.count ? p.n_k : keys.at(chunk_end);
  int64_t i = chunk_begin;
  for (int64_t key = begin; key < end; ++key) {
    if (i < chunk_end && keys.at(i) == key) {
      const int64_t row = i++ - chunk_begin;
      write_row(t.dk, item.b, item.h_kv, key, p.d_qk, w.dk + row * padded(p.d_qk), static_cast<float>(p.scale));
      write_row(t.dv, item.b, item.h_kv, key, p.d_v, w.dv + row * padded(p.d_v), 1.0f);
    } else {
      zero_row(t.dk, item.b, item.h_kv, key, p.d_qk);
      zero_row(t.dv, item.b, item.h_kv, key, p.d_v);
    }
  }
}

void backward(const Problem& p, const BackwardTensors& t, const BackwardItem& item, float* scratch) {
  const BackwardScratch w(p, scratch);
  [[maybe_unused]] const MultiplierInUse multiplier;
  if (item.wants_dq) {
    for (int64_t h = item.first_head; h < item.last_head; ++h) {
      for (int64_t query = item.first_query; query < item.last_query; ++query) zero_row(t.dq, item.b, h, query, p.d_qk);
    }
  }
  int64_t begin = item.first_key;
  do {
    const int64_t end = lesser(begin + cached_keys(p), item.last_key);
    if (item.wants_dkv) {
      __builtin_memset(w.dk, 0, (end - begin) * padded(p.d_qk) * sizeof(float));
      __builtin_memset(w.dv, 0, (end - begin) * padded(p.d_v) * sizeof(float));
    }
    for (int64_t h = item.first_head; h < item.last_head; ++h) {
      const IndexList queries = contributing_queries(p, t, item, h, w.queries);
      for (int64_t first = 0; first < queries.count; first += kStripQueries) {
        add_gradients_of_strip(p, t, item, h, queries, first, begin, end, w);
      }
    }
    if (item.wants_dkv) write_chunk(p, t, item, begin, end, w);
    begin = end;
  } while (begin < item.last_key);
}

int64_t backward_scratch(const Problem& p) { return BackwardScratch(p, nullptr).size; }

}  // namespace
}  // namespace fastattn::FASTATTN_ISA

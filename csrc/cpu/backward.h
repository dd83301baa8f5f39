// Backward: the heads that share keys and values, query block by query block, with P recomputed from lse
// (Dao et al. 2022, algorithm 4), transposed as in forward.h. delta = rowsum(dO * O); the gradient of lse is P.
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

// Keys whose dK and dV stay in the L2 cache while every block of queries adds to them.
int64_t cached_keys(const Problem& p) {
  constexpr int64_t kCacheFloats = (512 << 10) / sizeof(float);
  const int64_t blocks = kCacheFloats / (padded(p.d_qk) + padded(p.d_v)) / kBlockKeys;
  return greater(1, lesser(blocks, (p.n_k + kBlockKeys - 1) / kBlockKeys)) * kBlockKeys;
}

struct BackwardScratch {
  float *q, *q_t;                // [M, d_qk] and its transpose
  float *d_o, *d_o_t, *o, *o_t;  // [M, d_v] and its transpose
  float *k, *v;                  // copies of a block of keys, where one is needed
  float *p_t, *ds_t;             // [kBlockKeys, M]
  float* dropped_p_t;            // [kBlockKeys, M], Z^T and then Z^T * P^T
  float *dq_t, *dq;              // [d_qk, M] and its transpose
  float *dk, *dv;                // [cached_keys, d]
  int32_t* queries;              // [n_q]
  int64_t size;

  BackwardScratch(const Problem& p, float* base) {
    constexpr int64_t M = kColumns * kLanes;
    const int64_t d_qk = padded(p.d_qk), d_v = padded(p.d_v);
    Arena arena(base);
    q = arena.take(M * d_qk);
    q_t = arena.take(M * d_qk);
    d_o = arena.take(M * d_v);
    d_o_t = arena.take(M * d_v);
    o = arena.take(M * d_v);
    o_t = arena.take(M * d_v);
    k = arena.take(kBlockKeys * d_qk);
    v = arena.take(kBlockKeys * d_v);
    p_t = arena.take(kBlockKeys * M);
    ds_t = arena.take(kBlockKeys * M);
    dropped_p_t = arena.take(kBlockKeys * M);
    dq_t = arena.take(M * d_qk);
    dq = arena.take(M * d_qk);
    dk = arena.take(cached_keys(p) * d_qk);
    dv = arena.take(cached_keys(p) * d_v);
    queries = reinterpret_cast<int32_t*>(arena.take(p.n_q));
    size = arena.used();
  }
};

// The rounding of a smaller lse costs P at most 4 units in the last place.
constexpr double kPreciseLseLog2 = 16 * kLog2E;

// Per lane, what turns S into P and dP into dS. Lanes without a query are never added to anything.
template <int C>
struct RowStatistics {
  Floats lse_log2[C], lse_log2_rest[C];  // their sum is lse: rounded to one float, it would double the error of P
  Floats delta[C], d_lse[C];
  bool needs_refinement;
};

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

// Fills q, d_o, o and their transposes, and returns the statistics of n queries.
template <int C>
RowStatistics<C> load_queries(const Problem& p, const BackwardTensors& t, int64_t b, int64_t h,
                              const IndexList& queries, int64_t first, int64_t n, const BackwardScratch& w) {
  constexpr int M = C * kLanes;
  const int64_t d_qk = padded(p.d_qk), d_v = padded(p.d_v), row_of_head = (b * p.H + h) * p.n_q;
  __builtin_memset(w.q, 0, M * d_qk * sizeof(float));
  __builtin_memset(w.d_o, 0, M * d_v * sizeof(float));
  __builtin_memset(w.o, 0, M * d_v * sizeof(float));
  RowStatistics<C> rows{};
  for (int64_t i = 0; i < n; ++i) {
    const int64_t query = queries.at(first + i), c = i / kLanes, lane = i % kLanes;
    read_row(p.q, b, h, query, p.d_qk, w.q + i * d_qk);
    if (t.d_o.data) {
      read_row(t.d_o, b, h, query, p.d_v, w.d_o + i * d_v);
      read_row(t.o, b, h, query, p.d_v, w.o + i * d_v);
    }
    const double lse_log2 = t.lse[row_of_head + query] * kLog2E;
    rows.needs_refinement |= std::fabs(lse_log2) > kPreciseLseLog2;
    rows.lse_log2[c][lane] = static_cast<float>(lse_log2);
    rows.lse_log2_rest[c][lane] = static_cast<float>(lse_log2 - static_cast<float>(lse_log2));
    rows.d_lse[c][lane] = t.d_lse ? t.d_lse[row_of_head + query] : 0.0f;
  }
  transpose(w.q, d_qk, M, d_qk, split_scale(p.scale).on_query, w.q_t, M);
  transpose(w.d_o, d_v, M, d_v, 1.0f, w.d_o_t, M);
  transpose(w.o, d_v, M, d_v, 1.0f, w.o_t, M);
  // As dP is summed, in the same order: a query that sees a single key, where O = V, then has dS = 0 to the bit.
  for (int64_t begin = 0; begin < p.d_v; begin += kPartOfHeadDim) {
    Floats part[C] = {};
    for (int64_t d = begin; d < lesser(begin + kPartOfHeadDim, p.d_v); ++d) {
      for (int c = 0; c < C; ++c) part[c] += load(w.o_t + d * M + c * kLanes) * load(w.d_o_t + d * M + c * kLanes);
    }
    for (int c = 0; c < C; ++c) rows.delta[c] += part[c];
  }
  return rows;
}

// P^T of the keys at the places i, ..., i + R - 1 of the list, whose rows are at `k`.
template <int R, int C>
FASTATTN_INLINE void weight_tile(const Problem& p, const QueryBlock<C>& queries, const RowStatistics<C>& rows,
                                 const IndexList& keys, int64_t i, const float* k, int64_t k_stride, const float* q_t,
                                 Floats (&tile)[R][C]) {
  const float on_score_log2 = split_scale(p.scale).on_score_log2;
  product_over_head_dim(p.d_qk, k, k_stride, q_t, C * kLanes, tile);
  each_vector<R, C>([&](int r, int c) {
    const Floats p_log2 = tile[r][c] * on_score_log2 - rows.lse_log2[c] - rows.lse_log2_rest[c];
    tile[r][c] = exp2(at_most(p_log2, 64.0f));  // it is above 0 by rounding only, which takes an lse of 1e9 to get there
  });
  if (queries.sees_all(keys.at(i), keys.at(i + R - 1))) return;
  each_vector<R, C>([&](int r, int c) { tile[r][c] = queries.sees(c, keys.at(i + r)) ? tile[r][c] : Floats{}; });
}

// An lse of 1000 is rounded by up to 3e-5, and every weight of its row is off by that factor. The weights of a row sum
// to 1: what they sum to here tells the factor.
template <int C>
void refine_lse(const Problem& p, int64_t b, int64_t h_kv, const QueryBlock<C>& queries, const BackwardScratch& w,
                RowStatistics<C>& rows) {
  const IndexList& keys = p.keys[b];
  Floats sum[C] = {};
  each_key_block(keys, queries.range.some, 0, keys.count, [&](int64_t first, int64_t n) {
    const Panel k = key_panel(p.k, b, h_kv, keys, first, n, p.d_qk, w.k);
    each_tile<kScoreRows>(0, n, [&](auto tile_rows, int64_t i) {
      constexpr int R = decltype(tile_rows)::value;
      Floats p_t[R][C];
      weight_tile(p, queries, rows, keys, first + i, k.data + i * k.stride, k.stride, w.q_t, p_t);
      each_vector<R, C>([&](int r, int c) { sum[c] += p_t[r][c]; });
    });
  });
  for (int lane = 0; lane < C * kLanes; ++lane) {
    rows.lse_log2_rest[lane / kLanes][lane % kLanes] += log2f(sum[lane / kLanes][lane % kLanes]);
  }
}

// Writes P^T and dS^T of n keys, and with dropout turns Z^T into Z^T * P^T.
template <int C>
FASTATTN_INLINE void weights_and_gradients(const Problem& p, const QueryBlock<C>& queries, const RowStatistics<C>& rows,
                                           const IndexList& keys, int64_t first, int64_t n, Panel k, Panel v,
                                           const BackwardScratch& w) {
  constexpr int M = C * kLanes;
  each_tile<kScoreRows>(0, n, [&](auto tile_rows, int64_t i) {
    constexpr int R = decltype(tile_rows)::value;
    Floats tile[R][C];
    weight_tile(p, queries, rows, keys, first + i, k.data + i * k.stride, k.stride, w.q_t, tile);
    each_vector<R, C>([&](int r, int c) { store(w.p_t + (i + r) * M + c * kLanes, tile[r][c]); });
    product_over_head_dim(p.d_v, v.data + i * v.stride, v.stride, w.d_o_t, M, tile);
    if (p.dropout.drops) {
      each_vector<R, C>([&](int r, int c) {
        const int64_t at = (i + r) * M + c * kLanes;
        const Floats factors = load(w.dropped_p_t + at);
        tile[r][c] *= factors;
        store(w.dropped_p_t + at, factors * load(w.p_t + at));
      });
    }
    each_vector<R, C>([&](int r, int c) {
      const int64_t at = (i + r) * M + c * kLanes;
      store(w.ds_t + at, load(w.p_t + at) * (tile[r][c] - rows.delta[c] + rows.d_lse[c]));
    });
  });
}

// dQ^T += K^T dS^T.
template <int C>
FASTATTN_INLINE void accumulate_dq(int64_t n, int64_t d_qk, Panel k, const float* ds_t, float* dq_t) {
  constexpr int M = C * kLanes;
  each_tile<kValueRows>(0, d_qk, [&](auto tile_rows, int64_t d) {
    constexpr int R = decltype(tile_rows)::value;
    Floats acc[R][C];
    product(n, k.data + d, 1, k.stride, ds_t, M, acc);
    each_vector<R, C>([&](int r, int c) {
      float* at = dq_t + (d + r) * M + c * kLanes;
      store(at, load(at) + acc[r][c]);
    });
  });
}

// Adds dq_t, times scale, to the rows of the output.
template <int C>
void add_dq(const Problem& p, const BackwardTensors& t, int64_t b, int64_t h, const IndexList& queries, int64_t first,
            int64_t n, const BackwardScratch& w) {
  constexpr int M = C * kLanes;
  const int64_t d_qk = padded(p.d_qk);
  transpose(w.dq_t, M, d_qk, M, static_cast<float>(p.scale), w.dq, d_qk);
  for (int64_t i = 0; i < n; ++i) {
    float* dq = reinterpret_cast<float*>(t.dq.row(b, h, queries.at(first + i)));
    for (int64_t d = 0; d < p.d_qk; ++d) dq[d] += w.dq[i * d_qk + d];
  }
}

// n contributing queries of one head against the keys of a chunk.
template <int C>
void add_gradients(const Problem& p, const BackwardTensors& t, const BackwardItem& item, int64_t h,
                   const IndexList& query_list, int64_t first, int64_t n, int64_t chunk_begin, int64_t chunk_end,
                   const BackwardScratch& w) {
  constexpr int M = C * kLanes;
  const int64_t b = item.b, d_qk = padded(p.d_qk), d_v = padded(p.d_v);
  const IndexList& key_list = p.keys[b];
  const QueryBlock<C> queries(p, b, query_list, first, n);
  RowStatistics<C> rows = load_queries<C>(p, t, b, h, query_list, first, n, w);
  if (rows.needs_refinement && p.q.dtype == DType::f32) refine_lse<C>(p, b, item.h_kv, queries, w, rows);
  if (item.wants_dq) __builtin_memset(w.dq_t, 0, M * d_qk * sizeof(float));

  each_key_block(key_list, queries.range.some, chunk_begin, chunk_end, [&](int64_t i, int64_t n_keys) {
    const Panel k = key_panel(p.k, b, item.h_kv, key_list, i, n_keys, p.d_qk, w.k);
    const Panel v = key_panel(p.v, b, item.h_kv, key_list, i, n_keys, p.d_v, w.v);
    if (p.dropout.drops) {
      each_dropout_factor(p.dropout, b, h, queries, key_list, i, n_keys, [&](int64_t row, int c, Floats factors) {
        store(w.dropped_p_t + row * M + c * kLanes, factors);
      });
    }
    weights_and_gradients<C>(p, queries, rows, key_list, i, n_keys, k, v, w);
    if (item.wants_dq) accumulate_dq<C>(n_keys, p.d_qk, k, w.ds_t, w.dq_t);
    if (!item.wants_dkv) return;
    const float* weights_of_v = p.dropout.drops ? w.dropped_p_t : w.p_t;
    accumulate_rows(weights_of_v, M, n_keys, n, w.d_o, w.dv + (i - chunk_begin) * d_v, d_v);
    accumulate_rows(w.ds_t, M, n_keys, n, w.q, w.dk + (i - chunk_begin) * d_qk, d_qk);
  });

  if (item.wants_dq) add_dq<C>(p, t, b, h, query_list, first, n, w);
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
  constexpr int64_t M = kColumns * kLanes;
  const BackwardScratch w(p, scratch);
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
      for (int64_t first = 0; first < queries.count; first += M) {
        const int64_t n = lesser(M, queries.count - first);
        if (n > kLanes) {
          add_gradients<kColumns>(p, t, item, h, queries, first, n, begin, end, w);
        } else {
          add_gradients<1>(p, t, item, h, queries, first, n, begin, end, w);
        }
      }
    }
    if (item.wants_dkv) write_chunk(p, t, item, begin, end, w);
    begin = end;
  } while (begin < item.last_key);
}

int64_t backward_scratch(const Problem& p) { return BackwardScratch(p, nullptr).size; }

}  // namespace
}  // namespace fastattn::FASTATTN_ISA

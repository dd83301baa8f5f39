// Forward: one block of queries against all keys it sees, with the online softmax of FlashAttention
// (Dao et al. 2022, algorithm 1), transposed: lanes are queries, so that S^T = K Q^T takes K as it lies in memory,
// the softmax needs no sums across lanes, and hidden keys are skipped one by one.

namespace fastattn::FASTATTN_ISA {
namespace {

struct ForwardScratch {
  float *q, *q_t;        // [M, d_qk] and its transpose
  float *k, *v;          // copies of a block of keys, where one is needed
  float *p_t;            // [kBlockKeys, M], S^T and then P^T
  float *o_t, *o;        // [d_v, M] and its transpose
  int64_t size;

  ForwardScratch(const Problem& p, float* base) {
    constexpr int64_t M = kColumns * kLanes;
    Arena arena(base);
    q = arena.take(M * padded(p.d_qk));
    q_t = arena.take(M * padded(p.d_qk));
    k = arena.take(kBlockKeys * padded(p.d_qk));
    v = arena.take(kBlockKeys * padded(p.d_v));
    p_t = arena.take(kBlockKeys * M);
    o_t = arena.take(M * padded(p.d_v));
    o = arena.take(M * padded(p.d_v));
    size = arena.used();
  }
};

// m: the largest entry of S^T so far, l: the sum of the weights relative to it.
template <int C>
struct OnlineSoftmax {
  Floats m[C], l[C];
};

// Writes S^T = K Q^T of n keys, hidden ones -inf, and takes them into the maxima m.
template <int C>
FASTATTN_INLINE void scores(const QueryBlock<C>& queries, const float* q_t, int64_t d_qk, const IndexList& keys,
                            int64_t first, int64_t n, Panel k, float* s_t, Floats (&m)[C]) {
  constexpr int M = C * kLanes;
  each_tile<kScoreRows>(0, n, [&](auto rows, int64_t i) {
    constexpr int R = decltype(rows)::value;
    Floats s[R][C];
    product_over_head_dim(d_qk, k.data + i * k.stride, k.stride, q_t, M, s);
    if (!queries.sees_all(keys.at(first + i), keys.at(first + i + R - 1))) {
      each_vector<R, C>([&](int r, int c) {
        s[r][c] = queries.sees(c, keys.at(first + i + r)) ? s[r][c] : splat(-kInfinity);
      });
    }
    each_vector<R, C>([&](int r, int c) {
      m[c] = larger(s[r][c], m[c]);
      store(s_t + (i + r) * M + c * kLanes, s[r][c]);
    });
  });
}

// Turns S^T of n keys into P^T in place, moves the statistics on, and returns in `decay` the factor by which
// everything summed before shrinks.
template <int C>
FASTATTN_INLINE void softmax_step(int64_t n, float on_score_log2, const Floats (&new_m)[C], float* p_t,
                                  OnlineSoftmax<C>& state, Floats (&decay)[C]) {
  constexpr int M = C * kLanes;
  Floats reference[C], sum[C];
  for (int c = 0; c < C; ++c) {
    reference[c] = new_m[c] == -kInfinity ? Floats{} : new_m[c];  // finite_max
    decay[c] = exp2((state.m[c] - reference[c]) * on_score_log2);
    sum[c] = Floats{};
  }
  for (int64_t i = 0; i < n; ++i) {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      float* at = p_t + i * M + c * kLanes;
      // The difference first: the largest weight is then exactly 1, and a single key gives O = V to the bit.
      const Floats p = exp2((load(at) - reference[c]) * on_score_log2);
      sum[c] += p;
      store(at, p);
    }
  }
  for (int c = 0; c < C; ++c) {
    state.m[c] = new_m[c];
    state.l[c] = state.l[c] * decay[c] + sum[c];
  }
}

// O^T = decay * O^T + V^T P^T. A block is summed from zero and then added, which halves the rounding error.
template <int C>
FASTATTN_INLINE void accumulate_output(int64_t n, int64_t d_v, Panel v, const float* p_t, const Floats (&decay)[C],
                                       float* o_t) {
  constexpr int M = C * kLanes;
  each_tile<kValueRows>(0, d_v, [&](auto rows, int64_t d) {
    constexpr int R = decltype(rows)::value;
    Floats acc[R][C];
    product(n, v.data + d, 1, v.stride, p_t, M, acc);
    each_vector<R, C>([&](int r, int c) {
      float* at = o_t + (d + r) * M + c * kLanes;
      store(at, load(at) * decay[c] + acc[r][c]);
    });
  });
}

// n queries of one head, from place `first` of the list of real queries on.
template <int C>
void attend(const Problem& p, const ForwardOutputs& out, int64_t b, int64_t h, int64_t first, int64_t n,
            const ForwardScratch& w) {
  constexpr int M = C * kLanes;
  const IndexList &query_list = p.queries[b], &key_list = p.keys[b];
  const int64_t h_kv = h / p.group();
  const ScoreScale scale = split_scale(p.scale);
  const QueryBlock<C> queries(p, b, query_list, first, n);

  __builtin_memset(w.q, 0, M * padded(p.d_qk) * sizeof(float));
  for (int64_t i = 0; i < n; ++i) {
    read_row(p.q, b, h, query_list.at(first + i), p.d_qk, w.q + i * padded(p.d_qk));
  }
  transpose(w.q, padded(p.d_qk), M, padded(p.d_qk), scale.on_query, w.q_t, M);

  OnlineSoftmax<C> state;
  for (int c = 0; c < C; ++c) state.m[c] = splat(-kInfinity), state.l[c] = Floats{};
  __builtin_memset(w.o_t, 0, M * padded(p.d_v) * sizeof(float));

  each_key_block(key_list, queries.range.some, 0, key_list.count, [&](int64_t i, int64_t n_keys) {
    const Panel k = key_panel(p.k, b, h_kv, key_list, i, n_keys, p.d_qk, w.k);
    Floats new_m[C], decay[C];
    for (int c = 0; c < C; ++c) new_m[c] = state.m[c];
    scores<C>(queries, w.q_t, p.d_qk, key_list, i, n_keys, k, w.p_t, new_m);
    softmax_step<C>(n_keys, scale.on_score_log2, new_m, w.p_t, state, decay);
    if (p.dropout.drops) {  // after the sums: lse knows nothing of it
      each_dropout_factor(p.dropout, b, h, queries, key_list, i, n_keys, [&](int64_t row, int c, Floats factors) {
        float* at = w.p_t + row * M + c * kLanes;
        store(at, load(at) * factors);
      });
    }
    const Panel v = key_panel(p.v, b, h_kv, key_list, i, n_keys, p.d_v, w.v);
    accumulate_output<C>(n_keys, p.d_v, v, w.p_t, decay, w.o_t);
  });

  transpose(w.o_t, M, padded(p.d_v), M, 1.0f, w.o, padded(p.d_v));
  for (int64_t i = 0; i < n; ++i) {
    const int64_t query = query_list.at(first + i);
    const float m = state.m[i / kLanes][i % kLanes], l = state.l[i / kLanes][i % kLanes];
    write_row(out.o, b, h, query, p.d_v, w.o + i * padded(p.d_v), one_over_sum(l));
    out.lse[(b * p.H + h) * p.n_q + query] = lse_of(m, scale.on_score_log2, l);
  }
}

void forward(const Problem& p, const ForwardOutputs& out, const ForwardItem& item, float* scratch) {
  constexpr int64_t M = kColumns * kLanes;
  const ForwardScratch w(p, scratch);
  const IndexList& queries = p.queries[item.b];
  const int64_t first = item.block * M;

  const int64_t n = lesser(M, queries.count - first);
  if (n > kLanes) {
    attend<kColumns>(p, out, item.b, item.h, first, n, w);
  } else if (n > 0) {
    attend<1>(p, out, item.b, item.h, first, n, w);
  }

  if (queries.count == p.n_q) return;
  for (int64_t query = first; query < lesser(first + M, p.n_q); ++query) {
    if (queries.contains(query)) continue;
    zero_row(out.o, item.b, item.h, query, p.d_v);
    out.lse[(item.b * p.H + item.h) * p.n_q + query] = -kInfinity;
  }
}

int64_t forward_scratch(const Problem& p) { return ForwardScratch(p, nullptr).size; }

}  // namespace
}  // namespace fastattn::FASTATTN_ISA

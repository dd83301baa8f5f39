// Forward: a strip of queries against all keys they see, with the online softmax of FlashAttention (Dao et al. 2022,
// algorithm 1), transposed: lanes are queries, so that S^T = K Q^T takes K as it lies in memory, the softmax needs no
// sums across lanes, and hidden keys are skipped one by one.
//
// A block of keys meets all blocks of queries of the strip before the next one is loaded: the keys stay in the L1 cache
// and what has to be done to them (copied, widened, transposed) is done once. Blocks of keys begin at the multiples of
// kBlockKeys, wherever a strip begins, so that the result does not depend on how the queries are cut into strips.

namespace fastattn::FASTATTN_ISA {
namespace {

constexpr int64_t kStripBlocks = 8;  // blocks of queries in a strip

struct ForwardScratch {
  float *q, *o;              // [M, d]: rows of a block of queries on their way in or out
  float *k, *v, *v_t;        // copies of a block of keys, where they are needed
  float *p_t, *z_t;          // [kBlockKeys, M], S^T and then P^T; Z^T
  float *q_t, *o_t;          // [kStripBlocks, d, M]
  int64_t q_t_size, o_t_size;  // of one block
  int64_t size;

  ForwardScratch(const Problem& p, float* base) {
    constexpr int64_t M = kColumns * kLanes;
    q_t_size = M * units(p.d_qk), o_t_size = M * padded(p.d_v);
    Arena arena(base);
    q = arena.take(M * units(p.d_qk));
    o = arena.take(M * padded(p.d_v));
    k = arena.take(kBlockKeys * units(p.d_qk));
    v = arena.take(kBlockKeys * units(p.d_v));
    v_t = arena.take(transposed_size(kBlockKeys, p.d_v));
    p_t = arena.take(kBlockKeys * M);
    z_t = arena.take(p.dropout.drops ? kBlockKeys * M : 0);
    q_t = arena.take(kStripBlocks * q_t_size);
    o_t = arena.take(kStripBlocks * o_t_size);
    size = arena.used();
  }
};

// A block of queries on its way over the keys: Q^T and O^T, the largest entry m of S^T so far, and the sum l of the
// weights relative to it.
struct ForwardBlock {
  QueryBlock queries;
  float *q_t, *o_t;
  Floats m[kColumns], l[kColumns];
};

// Writes S^T = K Q^T of a part of the keys, hidden ones -inf, and takes them into the maxima m.
template <int C>
FASTATTN_INLINE void scores(const QueryBlock& queries, const float* q_t, int64_t d_qk, const KeyBlock& keys, Part part,
                            float* s_t, Floats (&m)[C]) {
  const Rows k = keys.k.at_row(part.begin);
  multiply_over_head_dim<kScoreRows, C>(part.n, steps_over(d_qk), k, {q_t, C * kLanes}, [&](int64_t row, auto& s) {
    const int64_t i = part.begin + row;
    if (!queries.sees_all(keys, i, sizeof(s) / sizeof(s[0]))) {
      each_vector(s, [&](Floats& x, int r, int c) { x = queries.sees(c, keys, i + r) ? x : splat(-kInfinity); });
    }
    each_vector(s, [&](Floats& x, int, int c) { m[c] = larger(x, m[c]); });
    store_floats(s_t, row, s);
  });
}

// Turns S^T of n keys into P^T in place, moves the statistics on, and returns in `decay` the factor by which
// everything summed before shrinks. Dropout multiplies the weights by Z after the sums: lse knows nothing of it.
template <int C>
FASTATTN_INLINE void softmax_step(int64_t n, float on_score_log2, const Floats (&new_m)[C], const float* z_t,
                                  float* p_t, ForwardBlock& block, Floats (&decay)[C]) {
  Floats reference[C], sum[C];
  for (int c = 0; c < C; ++c) {
    reference[c] = new_m[c] == -kInfinity ? Floats{} : new_m[c];  // finite_max
    decay[c] = exp2((block.m[c] - reference[c]) * on_score_log2);
    sum[c] = Floats{};
  }
  for (int64_t i = 0; i < n; i += kPerUnit) {
    Floats p[kPerUnit][C];
    each_vector(p, [&](Floats& x, int r, int c) {
      const int64_t at = ((i + r) * C + c) * kLanes;
      // The difference first: the largest weight is then exactly 1, and a single key gives O = V to the bit.
      x = exp2((load(p_t + at) - reference[c]) * on_score_log2);
      sum[c] += x;
      if (z_t) x *= load(z_t + at);
    });
    store_right(p_t, i, p);
  }
  for (int c = 0; c < C; ++c) {
    block.m[c] = new_m[c];
    block.l[c] = block.l[c] * decay[c] + sum[c];
  }
}

// O^T = decay * O^T + V^T P^T. A block is summed from zero and then added, which halves the rounding error.
template <int C>
FASTATTN_INLINE void accumulate_output(const KeyBlock& keys, Part part, int64_t d_v, const float* p_t,
                                       const Floats (&decay)[C], float* o_t) {
  const Transposed v_t = keys.v_t.at_step(part.begin / kPerUnit);
  multiply<kValueRows, C>(d_v, part.n / kPerUnit, v_t, {p_t, C * kLanes}, [&](int64_t d, auto& sum) {
    each_vector(sum, [&](Floats& x, int r, int c) {
      float* at = o_t + ((d + r) * C + c) * kLanes;
      store(at, load(at) * decay[c] + x);
    });
  });
}

// A block of queries against a block of keys.
template <int C>
void attend(const Problem& p, int64_t b, int64_t h, const KeyBlock& keys, ForwardBlock& block, const ForwardScratch& w) {
  const Part part = visible_part(block.queries, keys);
  if (part.n == 0) return;
  const float on_score_log2 = split_scale(p.scale).on_score_log2;
  Floats new_m[C], decay[C];
  for (int c = 0; c < C; ++c) new_m[c] = block.m[c];
  scores<C>(block.queries, block.q_t, p.d_qk, keys, part, w.p_t, new_m);
  if (p.dropout.drops) dropout_factors<C>(p.dropout, b, h, block.queries, keys, part, w.z_t);
  softmax_step<C>(part.n, on_score_log2, new_m, p.dropout.drops ? w.z_t : nullptr, w.p_t, block, decay);
  accumulate_output<C>(keys, part, p.d_v, w.p_t, decay, block.o_t);
}

// Makes a block of queries ready to attend.
template <int C>
void begin_block(const Problem& p, int64_t b, int64_t h, ForwardBlock& block, const ForwardScratch& w) {
  constexpr int64_t M = C * kLanes;
  const Rows q = rows_of(p.q, b, h, p.queries[b], block.queries.first, block.queries.n, M, p.d_qk, true, w.q);
  const float on_query = split_scale(p.scale).on_query;
  transpose(q.data, q.stride, M, units(p.d_qk), block.q_t, M, [&](Floats x) { return times_on_query(x, on_query); });
  for (int c = 0; c < C; ++c) block.m[c] = splat(-kInfinity), block.l[c] = Floats{};
  __builtin_memset(block.o_t, 0, M * padded(p.d_v) * sizeof(float));
}

// Writes the output and lse of a block of queries.
template <int C>
void end_block(const Problem& p, const ForwardOutputs& out, int64_t b, int64_t h, const ForwardBlock& block,
               const ForwardScratch& w) {
  constexpr int64_t M = C * kLanes;
  const float on_score_log2 = split_scale(p.scale).on_score_log2;
  transpose(block.o_t, M, padded(p.d_v), M, w.o, padded(p.d_v), Unchanged{});
  for (int64_t i = 0; i < block.queries.n; ++i) {
    const int64_t query = p.queries[b].at(block.queries.first + i);
    const float m = block.m[i / kLanes][i % kLanes], l = block.l[i / kLanes][i % kLanes];
    write_row(out.o, b, h, query, p.d_v, w.o + i * padded(p.d_v), one_over_sum(l));
    out.lse[(b * p.H + h) * p.n_q + query] = lse_of(m, on_score_log2, l);
  }
}

// Zeros for the queries first, ..., last - 1 that are padding.
void write_padding(const Problem& p, const ForwardOutputs& out, int64_t b, int64_t h, int64_t first, int64_t last) {
  const IndexList& queries = p.queries[b];
  if (queries.count == p.n_q) return;
  for (int64_t query = first; query < last; ++query) {
    if (queries.contains(query)) continue;
    zero_row(out.o, b, h, query, p.d_v);
    out.lse[(b * p.H + h) * p.n_q + query] = -kInfinity;
  }
}

void forward(const Problem& p, const ForwardOutputs& out, const ForwardItem& item, float* scratch) {
  constexpr int64_t M = kColumns * kLanes;
  const ForwardScratch w(p, scratch);
  [[maybe_unused]] const MultiplierInUse multiplier;
  const auto [b, h, first_query, last_query] = item;
  write_padding(p, out, b, h, first_query, lesser(last_query, p.n_q));

  ForwardBlock blocks[kStripBlocks];
  const IndexList &queries = p.queries[b], &key_list = p.keys[b];
  const int64_t end = lesser(last_query, queries.count);
  int64_t count = 0;
  KeyRange seen{p.n_k, 0};  // by any of them
  for (int64_t first = first_query; first < end; first += M, ++count) {
    ForwardBlock& block = blocks[count];
    block.queries.init(p, b, queries, first, lesser(M, end - first));
    block.q_t = w.q_t + count * w.q_t_size, block.o_t = w.o_t + count * w.o_t_size;
    seen = {lesser(seen.begin, block.queries.range.some.begin), greater(seen.end, block.queries.range.some.end)};
    with_columns(block.queries.n, [&](auto C) { begin_block<C>(p, b, h, block, w); });
  }

  each_key_block(key_list, seen, 0, key_list.count, [&](int64_t i, int64_t n) {
    KeyBlock keys{&key_list, i, n, {}, {}, {}, {}};
    keys.k = rows_of(p.k, b, h / p.group(), key_list, i, n, up_to_grain(n), p.d_qk, false, w.k);
    keys.v = rows_of(p.v, b, h / p.group(), key_list, i, n, up_to_grain(n), p.d_v, false, w.v);
    keys.v_t = transposed(keys.v, up_to_grain(n), p.d_v, w.v_t);
    for (int64_t j = 0; j < count; ++j) {
      with_columns(blocks[j].queries.n, [&](auto C) { attend<C>(p, b, h, keys, blocks[j], w); });
    }
  });
  for (int64_t j = 0; j < count; ++j) {
    with_columns(blocks[j].queries.n, [&](auto C) { end_block<C>(p, out, b, h, blocks[j], w); });
  }
}

int64_t forward_scratch(const Problem& p) { return ForwardScratch(p, nullptr).size; }

}  // namespace
}  // namespace fastattn::FASTATTN_ISA

// A block of queries and a block of keys, made ready for the products.

namespace fastattn::FASTATTN_ISA {
namespace {

constexpr int64_t kBlockKeys = FASTATTN_BLOCK_KEYS;
static_assert(kBlockKeys % kGrain == 0);

// Hands out pieces of one allocation; with a null base it only measures.
class Arena {
 public:
  explicit Arena(float* base) : base_(base) {}
  float* take(int64_t floats) {
    float* piece = base_ ? base_ + used_ : nullptr;
    used_ += (floats + 15) / 16 * 16;  // pieces begin at cache lines
    return piece;
  }
  int64_t used() const { return used_; }

 private:
  float* base_;
  int64_t used_ = 0;
};

// Keys of one head at the places first, ..., first + n - 1 of the list. Beyond n, up to a multiple of kGrain, the rows
// are zeros.
struct KeyBlock {
  const IndexList* list;
  int64_t first, n;
  Rows k, v;
  Transposed k_t, v_t;

  int64_t key(int64_t i) const { return list->at(first + i); }
};

// How many blocks of keys are made ready before a block of queries meets them: one, so that it stays in the L1 cache
// for all blocks of queries, or, where making ready takes long, as many as fit the L2 cache.
constexpr int64_t kChunkBlocks = FASTATTN_CHUNK_BLOCKS;

inline int64_t key_blocks_in_chunk(const Problem& p) {
  constexpr int64_t kCacheFloats = (512 << 10) / sizeof(float);
  const int64_t block = kBlockKeys * greater(1, units(p.d_qk) + units(p.d_v));
  return greater(1, lesser(kChunkBlocks, lesser(kCacheFloats / block, (p.n_k + kBlockKeys - 1) / kBlockKeys)));
}

// Queries that meet a chunk of keys, block by block, before the next one.
constexpr int64_t kStripQueries = 256;
constexpr int kFewestOfBlock = kColumns / 2 < kFewestColumns ? kColumns : kColumns / 2;  // vectors in a narrow block
constexpr int64_t kStripBlocks = kStripQueries / (kFewestOfBlock * kLanes);
static_assert(kStripQueries % (kColumns * kLanes) == 0);

constexpr int64_t up_to_grain(int64_t n) { return (n + kGrain - 1) / kGrain * kGrain; }

// Rows i, ..., i + n - 1 of a list, and zeros up to n_padded rows: where they lie if they serve as they are, else copied
// to `copy`. Whole vectors of units can be loaded from a row if `by_vectors`.
Rows rows_of(const Input& x, int64_t b, int64_t h, const IndexList& list, int64_t i, int64_t n, int64_t n_padded,
             int64_t d, bool by_vectors, float* copy) {
  const bool fits = n == n_padded && (!by_vectors || d == units(d) * kPerUnit);
  if (fits && are_units(x, d) && list.consecutive(i, n)) {
    return {reinterpret_cast<const float*>(x.row(b, h, list.at(i))), x.row_stride / kPerUnit};
  }
  read_units(x, b, h, list, i, n, d, copy);
  __builtin_memset(copy + n * units(d), 0, (n_padded - n) * units(d) * sizeof(float));
  return {copy, units(d)};
}

// Queries in a block. Where every query sees few keys, a block is narrow: fewer pairs at the edges of what they see are
// computed and then hidden.
int64_t block_queries(const Problem& p) {
  constexpr int64_t kFewKeys = 256;
  const auto seen = [&](int64_t reach) { return clamp(reach, 0, p.n_k / 2); };  // to one side, about
  const bool has_edges = p.band.left < p.n_k || p.band.right < p.n_k;
  const bool narrow = has_edges && seen(p.band.left) + seen(p.band.right) <= kFewKeys;
  return (narrow ? kFewestOfBlock : kColumns) * kLanes;
}

// Queries of one head, at most kColumns * kLanes of them, one per lane, and the keys that each may see. Lanes without a
// query repeat the last one.
struct QueryBlock {
  int64_t first, n;  // places in a list of queries
  BlockRange range;
  Bits index[kColumns];  // of the queries
  Ints begin[kColumns];
  Bits length[kColumns];
  uint32_t gaps;  // in the ranges of some

  void init(const Problem& p, int64_t b, int64_t h, const IndexList& queries, int64_t first_place, int64_t count) {
    first = first_place, n = count;
    range = no_queries(p.n_k);
    gaps = kNoGaps;
    const bool all_alike = !p.ranges.data && p.visible(b, h, queries.at(first)).covers(p.n_k) &&
                           p.visible(b, h, queries.at(first + n - 1)).covers(p.n_k);
    for (int lane = 0; lane < kColumns * kLanes; ++lane) {
      const int64_t query = queries.at(first + (lane < n ? lane : n - 1));
      const KeyRange keys = all_alike ? KeyRange{0, p.n_k} : p.visible(b, h, query);
      range.add(keys);
      if (p.ranges.gaps) gaps |= p.ranges.at(b, h, query).gaps;
      index[lane / kLanes][lane % kLanes] = static_cast<uint32_t>(query);
      begin[lane / kLanes][lane % kLanes] = static_cast<int32_t>(keys.begin);
      length[lane / kLanes][lane % kLanes] = static_cast<uint32_t>(keys.end - keys.begin);
    }
  }

  // All lanes see all of the keys i, ..., i + n_keys - 1 of the block.
  bool sees_all(const KeyBlock& keys, int64_t i, int64_t n_keys) const {
    return i + n_keys <= keys.n && range.all.begin <= keys.key(i) && keys.key(i + n_keys - 1) < range.all.end;
  }

  // The lanes of vector c that see key i of the block, in one unsigned comparison: none sees what is beyond its end.
  FASTATTN_INLINE Ints sees(int c, const KeyBlock& keys, int64_t i) const {
    const auto key = static_cast<int32_t>(i < keys.n ? keys.key(i) : -1);
    return (Bits)(key - begin[c]) < length[c];
  }
};

// run(std::integral_constant<int, C>) with the fewest vectors of queries that hold n.
template <int C = kColumns, class Run>
FASTATTN_INLINE void with_columns(int64_t n, Run run) {
  if constexpr (C / 2 >= kFewestColumns) {
    if (n <= C / 2 * kLanes) return with_columns<C / 2>(n, run);
  }
  run(std::integral_constant<int, C>{});
}

// The blocks of the key list that begin at multiples of their size, as far as they lie in [first, last) and hold keys of
// `seen`: run(place of the first key, number of keys).
template <int64_t kSize = kBlockKeys, class Run>
FASTATTN_INLINE void each_key_block(const IndexList& keys, KeyRange seen, int64_t first, int64_t last, Run run) {
  const int64_t end = lesser(last, keys.lower_bound(seen.end));
  const int64_t begin = greater(first, keys.lower_bound(seen.begin) / kSize * kSize);
  for (int64_t i = begin; i < end; i += kSize) run(i, lesser(kSize, last - i));
}

// The same blocks, by whole chunks of them: run(place of the first key, place after the last one).
template <class Run>
FASTATTN_INLINE void each_key_chunk(const IndexList& keys, KeyRange seen, int64_t first, int64_t last,
                                    int64_t chunk_keys, Run run) {
  const int64_t end = lesser(last, (keys.lower_bound(seen.end) + kBlockKeys - 1) / kBlockKeys * kBlockKeys);
  const int64_t begin = greater(first, keys.lower_bound(seen.begin) / kBlockKeys * kBlockKeys);
  for (int64_t i = begin; i < end; i += chunk_keys) run(i, lesser(i + chunk_keys, end));
}

// The part of a block of keys that a block of queries may see, in whole grains: keys begin, ..., begin + n - 1 of it.
struct Part {
  int64_t begin, n;
};

FASTATTN_INLINE Part visible_part(const QueryBlock& queries, const KeyBlock& keys) {
  const int64_t begin = greater(keys.list->lower_bound(queries.range.some.begin) - keys.first, 0) / kGrain * kGrain;
  const int64_t end = lesser(keys.list->lower_bound(queries.range.some.end) - keys.first, keys.n);
  return {begin, greater(up_to_grain(end) - begin, 0)};
}

// Sets what is hidden in a matrix [part.n, C * kLanes] to `hidden`.
template <int C>
FASTATTN_INLINE void hide(const QueryBlock& queries, const KeyBlock& keys, Part part, float* x, float hidden) {
  if (queries.sees_all(keys, part.begin, part.n)) return;
  for (int64_t row = 0; row < part.n; ++row) {
    if (queries.sees_all(keys, part.begin + row, 1)) continue;
    for (int c = 0; c < C; ++c) {
      float* at = x + (row * C + c) * kLanes;
      store(at, queries.sees(c, keys, part.begin + row) ? load(at) : splat(hidden));
    }
  }
}

}  // namespace
}  // namespace fastattn::FASTATTN_ISA

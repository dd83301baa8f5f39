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
constexpr int64_t kBlockQueries = kColumns * kLanes;
constexpr int64_t kStripBlocks = kStripQueries / kBlockQueries;
static_assert(kStripQueries % kBlockQueries == 0);

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

// Queries of one head, at most kBlockQueries of them, one per lane, and the keys that each may see. Lanes without a query
// repeat the last one.
struct QueryBlock {
  int64_t first, n;  // places in a list of queries
  BlockRange range;  // of all of them
  BlockRange ranges[kColumns];  // of each vector
  Bits index[kColumns];  // of the queries
  Ints begin[kColumns];
  Bits length[kColumns];
  uint32_t gaps;  // in the ranges of some

  void init(const Problem& p, int64_t b, int64_t h, const IndexList& queries, int64_t first_place, int64_t count) {
    first = first_place, n = count;
    for (BlockRange& of_vector : ranges) of_vector = no_queries(p.n_k);
    gaps = kNoGaps;
    const bool all_alike = !p.ranges.data && p.visible(b, h, queries.at(first)).covers(p.n_k) &&
                           p.visible(b, h, queries.at(first + n - 1)).covers(p.n_k);
    for (int lane = 0; lane < kBlockQueries; ++lane) {
      const int64_t query = queries.at(first + (lane < n ? lane : n - 1));
      const KeyRange keys = all_alike ? KeyRange{0, p.n_k} : p.visible(b, h, query);
      if (lane < n) ranges[lane / kLanes].add(keys);
      if (p.ranges.gaps) gaps |= p.ranges.at(b, h, query).gaps;
      index[lane / kLanes][lane % kLanes] = static_cast<uint32_t>(query);
      begin[lane / kLanes][lane % kLanes] = static_cast<int32_t>(keys.begin);
      length[lane / kLanes][lane % kLanes] = static_cast<uint32_t>(keys.end - keys.begin);
    }
    range = range_of(0, kColumns);
  }

  // What the queries of `count` vectors may see.
  BlockRange range_of(int first_vector, int count) const {
    BlockRange joint = ranges[first_vector];
    for (int c = first_vector + 1; c < first_vector + count; ++c) joint.add(ranges[c]);
    return joint;
  }

  // A block of `count` of its vectors.
  QueryBlock vectors(int first_vector, int count) const {
    QueryBlock part;
    part.first = first + first_vector * kLanes, part.n = clamp(n - first_vector * kLanes, 0, count * kLanes);
    part.range = range_of(first_vector, count);
    part.gaps = gaps;
    for (int c = 0; c < count; ++c) {
      part.ranges[c] = ranges[first_vector + c];
      part.index[c] = index[first_vector + c];
      part.begin[c] = begin[first_vector + c];
      part.length[c] = length[first_vector + c];
    }
    return part;
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

  int64_t end() const { return begin + n; }
  Part between(int64_t from, int64_t to) const {
    from = greater(from, begin), to = lesser(to, end());
    return {from, greater(to - from, 0)};
  }
};

FASTATTN_INLINE Part visible_part(KeyRange some, const KeyBlock& keys) {
  const int64_t begin = greater(keys.list->lower_bound(some.begin) - keys.first, 0) / kGrain * kGrain;
  const int64_t end = lesser(keys.list->lower_bound(some.end) - keys.first, keys.n);
  return {begin, greater(up_to_grain(end) - begin, 0)};
}

// Cuts what a block of queries may see of a block of keys into parts for all of its vectors and parts for some, where at
// the edge of a mask this leaves out many pairs that nobody sees: run(std::integral_constant<int, vectors>, their
// queries, the first of them, the part of the keys).
template <int C, class Run>
void each_part(const QueryBlock& queries, int first_vector, const KeyBlock& keys, Part within, Run run) {
  constexpr int64_t kWorthACut = 8;  // vectors of pairs
  constexpr int kHalf = C / 2;
  const Part part = visible_part(queries.range.some, keys).between(within.begin, within.end());
  if (part.n == 0) return;
  if constexpr (kHalf >= kFewestColumns) {
    if (!queries.sees_all(keys, part.begin, part.n)) {
      const QueryBlock halves[] = {queries.vectors(0, kHalf), queries.vectors(kHalf, kHalf)};
      Part of_half[2];
      for (int i : {0, 1}) of_half[i] = visible_part(halves[i].range.some, keys).between(part.begin, part.end());
      if (C * part.n - kHalf * (of_half[0].n + of_half[1].n) >= kWorthACut) {
        const Part both = of_half[0].between(of_half[1].begin, of_half[1].end());
        if (both.n > 0) run(std::integral_constant<int, C>{}, queries, first_vector, both);
        for (int i : {0, 1}) {
          const auto rest = [&](int64_t begin, int64_t end) {
            each_part<kHalf>(halves[i], first_vector + i * kHalf, keys, of_half[i].between(begin, end), run);
          };
          rest(part.begin, both.n > 0 ? both.begin : part.end());
          if (both.n > 0) rest(both.end(), part.end());
        }
        return;
      }
    }
  }
  run(std::integral_constant<int, C>{}, queries, first_vector, part);
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

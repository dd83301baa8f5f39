// A block of queries and a block of keys, prepared for the products.
#pragma once

#include <cstdint>
#include <type_traits>

#include "arith.h"
#include "matrix.h"
#include "params.h"
#include "vector.h"

namespace fastattn::FASTATTN_ISA {
namespace {

constexpr int64_t kBlockKeys = FASTATTN_BLOCK_KEYS;
static_assert(kBlockKeys % kGrain == 0);

// Keys in a block where a bool mask has gaps: those of a mask that is made of blocks often lie in runs of 64, which are
// then not cut.
constexpr int64_t kMaskedBlockKeys = (kBlockKeys + 63) / 64 * 64;
inline int64_t block_keys(const Params& p) { return p.mask_tiles.data ? kMaskedBlockKeys : kBlockKeys; }

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

// Blocks of keys that are prepared before queries attend to them: one, so that it stays in the L1 cache for all blocks
// of queries, or, where preparing them takes long, as many as fit the L2 cache.
constexpr int64_t kChunkBlocks = FASTATTN_CHUNK_BLOCKS;

inline int64_t key_blocks_in_chunk(const Params& p) {
  constexpr int64_t kCacheFloats = (512 << 10) / sizeof(float);
  const int64_t keys = block_keys(p), block = keys * greater(1, units(p.d_qk) + units(p.d_v));
  return greater(1, lesser(kChunkBlocks, lesser(kCacheFloats / block, (p.n_k + keys - 1) / keys)));
}

// The most keys of an isolated run that are handled as a single block (short_kv.h), which skips no tiles of a mask.
constexpr int64_t kSingleBlockKeys = FASTATTN_SINGLE_BLOCK_KEYS;
inline int64_t most_keys(const Params& p) { return greater(block_keys(p), kSingleBlockKeys); }  // in any block

inline bool fits_single_block(const Params& p, int64_t b, const IsolatedRun& isolated_run) {
  const int64_t keys = p.keys[b].lower_bound(isolated_run.keys.end) - p.keys[b].lower_bound(isolated_run.keys.begin);
  return 0 < keys && keys <= kSingleBlockKeys && !p.finishes_scores() && !p.mask_tiles.many_skipped;
}

// Queries that attend to a chunk of keys, block by block, before the next chunk is prepared.
constexpr int64_t kStripQueries = 256;
constexpr int64_t kBlockQueries = kColumns * kLanes;
constexpr int64_t kStripBlocks = kStripQueries / kBlockQueries;
static_assert(kStripQueries % kBlockQueries == 0);

constexpr int64_t up_to_grain(int64_t n) { return (n + kGrain - 1) / kGrain * kGrain; }

// Rows i, ..., i + n - 1 of a list, and zeros up to n_padded rows: where they lie if they serve as they are, else
// copied to `copy`. Whole vectors of units can be loaded from a row if `by_vectors`.
Rows rows_of(const Input& x, int64_t b, int64_t h, const IndexList& list, int64_t i, int64_t n, int64_t n_padded,
             int64_t d, bool by_vectors, float* copy) {
  const bool fits = n == n_padded && (!by_vectors || d == units(d) * kPerUnit);
  if (fits && are_units(x, d) && x.in_steps(list, i, n)) {
    return {reinterpret_cast<const float*>(x.row(b, h, list.at(i))), x.row_stride / kPerUnit};
  }
  read_units(x, b, h, list, i, n, d, copy);
  __builtin_memset(copy + n * units(d), 0, (n_padded - n) * units(d) * sizeof(float));
  return {copy, units(d)};
}

// Calls run(isolated run, place of the first query, place after the last one) for the isolated runs of a list of
// queries, which holds all real ones or some of them: for the blocks that begin with queries from first_query to
// last_query - 1.
template <class Run>
FASTATTN_INLINE void each_isolated_run(const Params& p, int64_t b, const IndexList& queries, int64_t first_query,
                                       int64_t last_query, Run run) {
  const IndexList& real = p.queries[b];
  const IsolatedRun whole{0, real.count, {0, p.n_k}, false};
  const IsolatedRunList isolated_runs = p.isolated_runs ? p.isolated_runs[b] : IsolatedRunList{&whole, 1};
  const auto place = [&](int64_t of_real) {
    if (queries.count == real.count) return of_real;
    return of_real < real.count ? queries.lower_bound(real.at(of_real)) : queries.count;
  };
  const int64_t first = queries.lower_bound(first_query), last = queries.lower_bound(last_query);
  int64_t i = 0;
  for (int64_t end = isolated_runs.count; i < end;) {  // finds the first one that ends after `first`
    const int64_t middle = (i + end) / 2;
    if (place(isolated_runs.data[middle].last) <= first) {
      i = middle + 1;
    } else {
      end = middle;
    }
  }
  for (; i < isolated_runs.count && place(isolated_runs.data[i].first) < last; ++i) {
    const IsolatedRun& isolated_run = isolated_runs.data[i];
    const int64_t first_of_run = place(isolated_run.first), last_of_run = place(isolated_run.last);
    const auto first_block_from = [&](int64_t at) {
      const int64_t blocks = (greater(at - first_of_run, 0) + kBlockQueries - 1) / kBlockQueries;
      return lesser(first_of_run + blocks * kBlockQueries, last_of_run);
    };
    const int64_t begin = first_block_from(first), end = first_block_from(last);
    if (begin < end) run(isolated_run, begin, end);
  }
}

// About how many pairs of a block of queries and a block of keys at these places are computed: half of them, as with a
// causal mask, or all where the keys are a single block.
int64_t pairs_of_blocks(const Params& p, int64_t b, int64_t first_query, int64_t last_query, int64_t first_key,
                        int64_t last_key) {
  const auto blocks = [](int64_t n, int64_t size) { return (greater(n, 0) + size - 1) / size; };
  int64_t pairs = 0;
  each_isolated_run(
      p, b, p.queries[b], first_query, last_query, [&](const IsolatedRun& isolated_run, int64_t first, int64_t last) {
        const int64_t of_queries = blocks(last - first, kBlockQueries);
        const int64_t begin = greater(p.keys[b].lower_bound(isolated_run.keys.begin), first_key);
        const int64_t end = lesser(p.keys[b].lower_bound(isolated_run.keys.end), last_key);
        pairs += fits_single_block(p, b, isolated_run) ? of_queries : of_queries * blocks(end - begin, kBlockKeys) / 2;
      });
  return pairs;
}

// Queries of one head, at most kBlockQueries of them, one per lane, and the keys that each may see. Lanes without a
// query repeat the last one.
struct QueryBlock {
  int64_t first, n;             // places in a list of queries
  int64_t origin;               // the place of a key from which the keys are cut into blocks
  BlockRange range;             // of all of them
  BlockRange ranges[kColumns];  // of each vector
  Bits index[kColumns];         // of the queries
  Ints begin[kColumns];
  Bits length[kColumns];
  uint32_t gaps;  // in the ranges of some

  void init(const Params& p, int64_t b, int64_t h, const IndexList& queries, const IsolatedRun& isolated_run,
            int64_t first_place, int64_t count) {
    first = first_place, n = count, origin = p.keys[b].lower_bound(isolated_run.keys.begin);
    const bool see_every_key = !p.ranges.data && p.visible(b, h, queries.at(first)).covers(p.n_k) &&
                               p.visible(b, h, queries.at(first + n - 1)).covers(p.n_k);
    if ((see_every_key || isolated_run.see_all) && queries.consecutive(first, n)) {
      return init_alike(see_every_key ? KeyRange{0, p.n_k} : isolated_run.keys, queries.at(first), p.n_k);
    }
    for (BlockRange& of_vector : ranges) of_vector = no_queries(p.n_k);
    gaps = kNoGaps;
    for (int lane = 0; lane < kBlockQueries; ++lane) {
      const int64_t query = queries.at(first + (lane < n ? lane : n - 1));
      const KeyRange keys = p.visible(b, h, query);
      if (lane < n) ranges[lane / kLanes].add(keys);
      gaps |= p.gaps(b, h, query);
      index[lane / kLanes][lane % kLanes] = static_cast<uint32_t>(query);
      begin[lane / kLanes][lane % kLanes] = static_cast<int32_t>(keys.begin);
      length[lane / kLanes][lane % kLanes] = static_cast<uint32_t>(keys.end - keys.begin);
    }
    range = range_of(0, kColumns);
  }

  void init(const Params& p, int64_t b, int64_t h, const IndexList& queries, int64_t first_place, int64_t count) {
    init(p, b, h, queries, IsolatedRun{0, queries.count, {0, p.n_k}, false}, first_place, count);
  }

  // Queries that follow each other, all of which see all of the keys.
  void init_alike(KeyRange keys, int64_t first_query, int64_t n_k) {
    range = {keys, keys};
    gaps = kNoGaps;
    for (int c = 0; c < kColumns; ++c) {
      ranges[c] = c * kLanes < n ? range : no_queries(n_k);
      begin[c] = Ints{} + static_cast<int32_t>(keys.begin);
      length[c] = Bits{} + static_cast<uint32_t>(keys.end - keys.begin);
      const Ints lane = numbers_of_lanes() + c * kLanes, last = Ints{} + static_cast<int32_t>(n - 1);
      index[c] = (Bits)(lane < last ? lane : last) + static_cast<uint32_t>(first_query);
    }
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
    part.origin = origin;
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
    return n_keys == 0 ||
           (i + n_keys <= keys.n && range.all.begin <= keys.key(i) && keys.key(i + n_keys - 1) < range.all.end);
  }

  // The lanes of vector c that see key i of the block, in one unsigned comparison: none sees what is beyond its end.
  FASTATTN_INLINE Ints sees(int c, const KeyBlock& keys, int64_t i) const {
    const auto key = static_cast<int32_t>(i < keys.n ? keys.key(i) : -1);
    return (Bits)(key - begin[c]) < length[c];
  }
};

// x^T [units, M] of n rows of queries, times on_query of ../softmax.h. Lanes beyond n repeat the last row.
FASTATTN_ONCE void transpose_queries(Rows x, int64_t n, int64_t n_units, float on_query, float* to, int64_t M) {
  transpose(
      M, n_units,
      [&](int64_t i, int64_t j) { return times_on_query(load(x.data + lesser(i, n - 1) * x.stride + j), on_query); },
      [&](int64_t j, int64_t i, Floats column) { store(to + j * M + i, column); });
}

// The fewest vectors that hold n queries.
constexpr int columns_of(int64_t n) {
  constexpr int kStep = kFewestColumns * kLanes;
  return static_cast<int>((n + kStep - 1) / kStep) * kFewestColumns;
}

// run(std::integral_constant<int, C>) for a number C of vectors of queries.
template <int kAtLeast = kFewestColumns, class Run>
FASTATTN_INLINE void with_columns(int C, Run run) {
  if constexpr (kAtLeast + kFewestColumns <= kColumns) {
    if (C > kAtLeast) return with_columns<kAtLeast + kFewestColumns>(C, run);
  }
  run(std::integral_constant<int, kAtLeast>{});
}

// The blocks of the key list that begin at `origin` and multiples of their size after it, as far as they lie in
// [first, last) and hold keys of `seen`: run(place of the first key, number of keys).
template <class Run>
FASTATTN_INLINE void each_key_block(const IndexList& keys, KeyRange seen, int64_t origin, int64_t first, int64_t last,
                                    int64_t size, Run run) {
  const int64_t end = lesser(last, keys.lower_bound(seen.end));
  const int64_t begin = greater(first, origin + (keys.lower_bound(seen.begin) - origin) / size * size);
  for (int64_t i = begin; i < end; i += size) run(i, lesser(size, last - i));
}

// The same blocks, by whole chunks of them: run(place of the first key, place after the last one).
template <class Run>
FASTATTN_INLINE void each_key_chunk(const IndexList& keys, KeyRange seen, int64_t origin, int64_t last,
                                    int64_t chunk_keys, int64_t size, Run run) {
  const auto blocks_before = [&](int64_t places) { return (places - origin) / size * size; };
  const int64_t begin = origin + blocks_before(keys.lower_bound(seen.begin));
  const int64_t end = lesser(last, origin + blocks_before(keys.lower_bound(seen.end) + size - 1));
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

// Cuts what a block of queries may see of a block of keys into parts for all of its vectors and parts for some, where
// at the edge of a mask this leaves out many hidden pairs: run(vectors, their queries, the first of them, the part of
// the keys).
template <class Run>
void each_part(int C, const QueryBlock& queries, int first_vector, const KeyBlock& keys, Part within, Run run) {
  constexpr int64_t kWorthACut = 8;  // vectors of pairs
  const int n_lower = C / 2, n_upper = C - n_lower;
  const Part part = visible_part(queries.range.some, keys).between(within.begin, within.end());
  if (part.n == 0) return;
  if (n_lower >= kFewestColumns && !queries.sees_all(keys, part.begin, part.n)) {
    const QueryBlock upper = queries.vectors(0, n_upper), lower = queries.vectors(n_upper, n_lower);
    const Part of_upper = visible_part(upper.range.some, keys).between(part.begin, part.end());
    const Part of_lower = visible_part(lower.range.some, keys).between(part.begin, part.end());
    if (C * part.n - n_upper * of_upper.n - n_lower * of_lower.n >= kWorthACut) {
      const Part both = of_upper.between(of_lower.begin, of_lower.end());
      if (both.n > 0) run(C, queries, first_vector, both);
      const auto rest = [&](int vectors, const QueryBlock& half, int first, Part of_half) {
        const auto between = [&](int64_t begin, int64_t end) {
          each_part(vectors, half, first, keys, of_half.between(begin, end), run);
        };
        between(part.begin, both.n > 0 ? both.begin : part.end());
        if (both.n > 0) between(both.end(), part.end());
      };
      rest(n_upper, upper, first_vector, of_upper);
      rest(n_lower, lower, first_vector + n_upper, of_lower);
      return;
    }
  }
  run(C, queries, first_vector, part);
}

// The same for all of a block of keys, without the tiles of a bool mask that are skipped: run(vectors, their queries,
// the first of them, the part of the keys).
template <class Run>
void each_visible_part(const Params& p, int64_t b, int64_t h, const IndexList& list, QueryBlock& queries,
                       const KeyBlock& keys, Run run) {
  const int C = columns_of(queries.n);
  if (!(queries.gaps & kDenseGaps)) return each_part(C, queries, 0, keys, {0, up_to_grain(keys.n)}, run);
  constexpr int64_t kStep = kGrain > kMaskTile ? kGrain : kMaskTile;
  const int64_t first_query = list.at(queries.first), last_query = list.at(queries.first + queries.n - 1);
  const Part part = visible_part(queries.range.some, keys);
  const auto end_of_step = [&](int64_t i) { return lesser((i / kStep + 1) * kStep, part.end()); };
  const auto tile = [&](int64_t i) {
    if (i >= keys.n) return kSkipped;
    const int64_t last_key = keys.key(lesser(end_of_step(i), keys.n) - 1);
    return p.mask_tiles.joint(b, h, first_query, last_query, keys.key(i), last_key);
  };
  const uint32_t gaps = queries.gaps;
  for (int64_t begin = part.begin, end; begin < part.end(); begin = end) {
    const MaskTile of_step = tile(begin);
    for (end = end_of_step(begin); end < part.end() && tile(end) == of_step;) end = end_of_step(end);
    if (of_step == kSkipped) continue;
    queries.gaps = of_step == kFull ? gaps & ~kDenseGaps : gaps;  // for this part
    each_part(C, queries, 0, keys, {begin, end - begin}, run);
  }
  queries.gaps = gaps;
}

// Sets what is hidden in a matrix [part.n, C * kLanes] to `hidden`.
FASTATTN_ONCE void hide(int C, const QueryBlock& queries, const KeyBlock& keys, Part part, float* x, float hidden) {
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

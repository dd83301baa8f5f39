// A block of queries and a block of keys, made ready for the products.

namespace fastattn::FASTATTN_ISA {
namespace {

constexpr int64_t kBlockKeys = 96;  // 48 to 120 are within 2 % of each other, measured on Zen 4

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

// fp32 rows, one per key of a block.
struct Panel {
  const float* data;
  int64_t stride;
};

// Rows i, ..., i + n - 1 of the key list: where they lie if they are fp32 and side by side, else copied to `copy`.
Panel key_panel(const Input& x, int64_t b, int64_t h, const IndexList& keys, int64_t i, int64_t n, int64_t d,
                float* copy) {
  if (x.dtype == DType::f32 && keys.consecutive(i, n)) {
    return {reinterpret_cast<const float*>(x.row(b, h, keys.at(i))), x.row_stride};
  }
  for (int64_t j = 0; j < n; ++j) read_row(x, b, h, keys.at(i + j), d, copy + j * padded(d));
  return {copy, padded(d)};
}

// C vectors of queries, one per lane, and the keys that each may see. Lanes without a query repeat the last one.
template <int C>
struct QueryBlock {
  static constexpr int M = C * kLanes;

  BlockRange range;
  Bits index[C];  // of the queries
  Ints begin[C];
  Bits length[C];

  QueryBlock(const Problem& p, int64_t b, const IndexList& queries, int64_t first, int64_t n)
      : range(block_range(p.visible(b, queries.at(first)), p.visible(b, queries.at(first + n - 1)))) {
    for (int lane = 0; lane < M; ++lane) {
      const int64_t query = queries.at(first + (lane < n ? lane : n - 1));
      const KeyRange keys = p.visible(b, query);
      index[lane / kLanes][lane % kLanes] = static_cast<uint32_t>(query);
      begin[lane / kLanes][lane % kLanes] = static_cast<int32_t>(keys.begin);
      length[lane / kLanes][lane % kLanes] = static_cast<uint32_t>(keys.end - keys.begin);
    }
  }

  // All lanes see all of the keys first, ..., last (or of those of them that are on a list).
  bool sees_all(int64_t first, int64_t last) const { return range.all.begin <= first && last < range.all.end; }

  // The lanes of vector c that see this key, in one unsigned comparison.
  FASTATTN_INLINE Ints sees(int c, int64_t key) const {
    return (Bits)(static_cast<int32_t>(key) - begin[c]) < length[c];
  }
};

// The places in the key list that a block of queries sees and that lie in [first, last), kBlockKeys at a time:
// run(place of the first key, number of keys).
template <class Run>
FASTATTN_INLINE void each_key_block(const IndexList& keys, KeyRange seen, int64_t first, int64_t last, Run run) {
  const int64_t end = lesser(last, keys.lower_bound(seen.end));
  for (int64_t i = greater(first, keys.lower_bound(seen.begin)); i < end; i += kBlockKeys) {
    run(i, lesser(kBlockKeys, end - i));
  }
}

}  // namespace
}  // namespace fastattn::FASTATTN_ISA

// Which tiles of the other side a tile of queries, or of keys, has anything to do with; in order, the others are skipped.
#pragma once

#include "tile.cuh"

namespace fastattn::cuda {

struct SeenTile {
  int first;  // token
  bool edge;  // some pairs may not be seen
};

// Shared memory of SeenTiles, for blocks of so many threads.
constexpr int bytes_of_seen(int threads) { return (threads + threads / kWarp) * int(sizeof(int)); }

// A tile of queries and all tiles of keys, or the other way round.
template <bool kOwnAreQueries, int kOthers, int kThreads>
class SeenTiles {
  static_assert(kThreads <= 1024 && kThreads % kWarp == 0);
  const Problem& p_;
  const int64_t b_;
  const int first_own_, own_count_;
  int* found_;  // shared, [kThreads]: 2 * tile + edge
  int* counts_;  // shared, [warps]
  int next_tile_ = 0, end_, taken_ = 0, found_count_ = 0;

 public:
  FASTATTN_DEVICE SeenTiles(const Problem& p, int64_t b, int first_own, int own_count, int* shared)
      : p_(p), b_(b), first_own_(first_own), own_count_(own_count), found_(shared), counts_(shared + kThreads) {
    const Tokens own = own_tokens();
    end_ = own.some_real ? (others().n + kOthers - 1) / kOthers : 0;
    if (others().position || others().document) return;
    // Where the others stand one after the other, it is known where those begin and end that can be seen.
    const int64_t before = kOwnAreQueries ? p.band.left : p.band.right, after = kOwnAreQueries ? p.band.right : p.band.left;
    const int64_t start = others().position_of(b, 0);
    next_tile_ = clamp(own.first_position - before - start, 0, others().n) / kOthers;
    end_ = lesser(end_, (clamp(own.last_position + after + 1 - start, 0, others().n) + kOthers - 1) / kOthers);
  }

  // Whether there is one more; the same for all threads, which all have to call it.
  FASTATTN_DEVICE bool next(SeenTile& tile) {
    while (taken_ == found_count_) {
      if (next_tile_ >= end_) return false;
      find();
    }
    const int code = found_[taken_++];
    tile = {code / 2 * kOthers, code % 2 != 0};
    return true;
  }

 private:
  // Not kept from one time to the next: registers are short.
  FASTATTN_DEVICE Tokens own_tokens() const {
    return (kOwnAreQueries ? p_.queries : p_.keys).tokens(b_, first_own_, own_count_);
  }
  FASTATTN_DEVICE const Side& others() const { return kOwnAreQueries ? p_.keys : p_.queries; }

  // Each thread looks at one of the next kThreads tiles.
  FASTATTN_DEVICE void find() {
    const int tile = next_tile_ + threadIdx.x;
    Sight sight = Sight::none;
    if (tile < end_) {
      const Tokens own = own_tokens(), other = others().tokens(b_, int64_t(tile) * kOthers, kOthers);
      sight = kOwnAreQueries ? cuda::sight(own, other, p_.band) : cuda::sight(other, own, p_.band);
      if (sight == Sight::all && p_.dense.data) sight = Sight::some;
    }
    const unsigned seen = __ballot_sync(~0u, sight != Sight::none);
    __syncthreads();  // all have taken what was found before
    if (lane() == 0) counts_[warp()] = __popc(seen);
    __syncthreads();
    int place = __popc(seen & ((1u << lane()) - 1));
    found_count_ = 0;
#pragma unroll
    for (int w = 0; w < kThreads / kWarp; ++w) {
      place += w < warp() ? counts_[w] : 0;
      found_count_ += counts_[w];
    }
    if (sight != Sight::none) found_[place] = 2 * tile + (sight == Sight::some);
    __syncthreads();
    next_tile_ += kThreads;
    taken_ = 0;
  }
};

}  // namespace fastattn::cuda

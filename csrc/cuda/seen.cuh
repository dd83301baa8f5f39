// Which tiles of the other side a tile of queries, or of keys, has anything to do with; in order, the others are skipped.
#pragma once

#include <cstdint>

#include "../mask.h"
#include "instructions.cuh"
#include "problem.h"
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
  const int b_, first_own_, own_count_;
  int* list_;  // shared: kThreads codes, 2 * tile + edge, and a count for each warp
  int next_tile_ = 0, end_, taken_ = 0, found_ = 0;

 public:
  FASTATTN_DEVICE SeenTiles(const Problem& p, int b, int first_own, int own_count, int* list)
      : p_(p), b_(b), first_own_(first_own), own_count_(own_count), list_(list) {
    const Tokens own = side<kOwnAreQueries>(p).tokens(b, first_own, own_count);
    const Side& others = side<!kOwnAreQueries>(p);
    end_ = own.some_real ? (others.n + kOthers - 1) / kOthers : 0;
    if (others.position || others.document) return;
    // Where the others stand one after the other, it is known where those begin and end that can be seen.
    const int64_t before = kOwnAreQueries ? p.band.left : p.band.right, after = kOwnAreQueries ? p.band.right : p.band.left;
    const int64_t start = others.position_of(b, 0);
    next_tile_ = clamp(own.first_position - before - start, 0, others.n) / kOthers;
    end_ = lesser(end_, (clamp(own.last_position + after + 1 - start, 0, others.n) + kOthers - 1) / kOthers);
  }

  // Whether there is one more; the same for all threads, which all have to call it.
  FASTATTN_DEVICE bool next(SeenTile& tile) {
    while (taken_ == found_) {
      if (next_tile_ >= end_) return false;
      found_ = find(p_, b_, first_own_, own_count_, next_tile_, end_, list_);
      next_tile_ += kThreads;
      taken_ = 0;
    }
    const int code = list_[taken_++];
    tile = {code / 2 * kOthers, code % 2 != 0};
    return true;
  }

 private:
  template <bool kQueries>
  FASTATTN_HD static const Side& side(const Problem& p) {
    return kQueries ? p.queries : p.keys;
  }

  // Lists the tiles seen of the next kThreads, of which each thread looks at one; returns how many there are. It is called
  // rarely, and in the loop of a kernel it would take registers from what is done always.
  FASTATTN_COLD static int find(const Problem& p, int b, int first_own, int own_count, int next_tile, int end, int* list) {
    int* counts = list + kThreads;
    const int tile = next_tile + threadIdx.x;
    Sight sight = Sight::none;
    if (tile < end) {
      const Tokens own = side<kOwnAreQueries>(p).tokens(b, first_own, own_count);
      const Tokens other = side<!kOwnAreQueries>(p).tokens(b, tile * kOthers, kOthers);
      sight = kOwnAreQueries ? cuda::sight(own, other, p.band) : cuda::sight(other, own, p.band);
      if (sight == Sight::all && p.dense.data) sight = Sight::some;
    }
    const unsigned seen = __ballot_sync(~0u, sight != Sight::none);
    if (lane() == 0) counts[warp()] = __popc(seen);
    __syncthreads();  // and all have taken what was found before
    int place = __popc(seen & ((1u << lane()) - 1)), found = 0;
    for (int w = 0; w < kThreads / kWarp; ++w) {
      place += w < warp() ? counts[w] : 0;
      found += counts[w];
    }
    if (sight != Sight::none) list[place] = 2 * tile + (sight == Sight::some);
    __syncthreads();
    return found;
  }
};

}  // namespace fastattn::cuda

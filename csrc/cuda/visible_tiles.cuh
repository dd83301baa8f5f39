// The tiles of keys that a tile of queries sees, or the tiles of queries that see a tile of keys, in order.
#pragma once

#include <cstdint>

#include "../mask.h"
#include "instructions.cuh"
#include "params.h"
#include "tile.cuh"

namespace fastattn::cuda {

struct VisibleTile {
  int first;     // token
  bool partial;  // some of its pairs may be hidden
};

// Bytes of shared memory that VisibleTiles takes in a block of that many threads.
constexpr int bytes_of_visible_tiles(int threads) { return (threads + threads / kWarp) * int(sizeof(int)); }

// A tile of queries and all tiles of keys, or the other way round.
template <bool kOwnAreQueries, int kOthers, int kThreads>
class VisibleTiles {
  static_assert(kThreads <= 1024 && kThreads % kWarp == 0);
  const Params& p_;
  const int b_, first_own_, own_count_;
  int* list_;  // shared: kThreads codes, 2 * tile + partial, and a count for each warp
  int next_tile_ = 0, end_, taken_ = 0, found_ = 0;

 public:
  FASTATTN_DEVICE VisibleTiles(const Params& p, int b, int first_own, int own_count, int* list)
      : p_(p), b_(b), first_own_(first_own), own_count_(own_count), list_(list) {
    const Tokens own = side<kOwnAreQueries>(p).tokens(b, first_own, own_count);
    const Side& others = side<!kOwnAreQueries>(p);
    end_ = own.some_real ? (others.n + kOthers - 1) / kOthers : 0;
    if (others.position || others.document) return;
    // Positions that increase by one tell where the visible tiles begin and end.
    const int64_t before = kOwnAreQueries ? p.band.left : p.band.right,
                  after = kOwnAreQueries ? p.band.right : p.band.left;
    const int64_t start = others.position_of(b, 0);
    next_tile_ = clamp(own.first_position - before - start, 0, others.n) / kOthers;
    end_ = lesser(end_, (clamp(own.last_position + after + 1 - start, 0, others.n) + kOthers - 1) / kOthers);
  }

  // Stores the next tile; false where there is none. All threads of a block must call it, with the same outcome.
  FASTATTN_DEVICE bool next(VisibleTile& tile) {
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
  FASTATTN_HD static const Side& side(const Params& p) {
    return kQueries ? p.queries : p.keys;
  }

  // Lists the visible ones of the next kThreads tiles, of which each thread tests one, and returns their number. It is
  // not inlined: it runs rarely, and would take registers from the loop of a kernel.
  FASTATTN_COLD static int find(const Params& p, int b, int first_own, int own_count, int next_tile, int end,
                                int* list) {
    int* counts = list + kThreads;
    const int tile = next_tile + threadIdx.x;
    TileKind kind = TileKind::skipped;
    if (tile < end) {
      const Tokens own = side<kOwnAreQueries>(p).tokens(b, first_own, own_count);
      const Tokens other = side<!kOwnAreQueries>(p).tokens(b, tile * kOthers, kOthers);
      kind = kOwnAreQueries ? tile_kind(own, other, p.band) : tile_kind(other, own, p.band);
      if (kind == TileKind::full && p.dense.data) kind = TileKind::partial;
    }
    const unsigned visible = __ballot_sync(~0u, kind != TileKind::skipped);
    if (lane() == 0) counts[warp()] = __popc(visible);
    __syncthreads();  // and all threads have read the previous list
    int place = __popc(visible & ((1u << lane()) - 1)), result = 0;
    for (int w = 0; w < kThreads / kWarp; ++w) {
      place += w < warp() ? counts[w] : 0;
      result += counts[w];
    }
    if (kind != TileKind::skipped) list[place] = 2 * tile + (kind == TileKind::partial);
    __syncthreads();
    return result;
  }
};

}  // namespace fastattn::cuda

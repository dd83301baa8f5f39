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

// A tile of queries and all tiles of keys, or the other way round. Each warp tests 32 of them at a time, one a lane:
// that is the same for every warp of a block, but takes no shared memory, of which sm_75 has just enough for two
// blocks.
template <bool kOwnAreQueries, int kOthers>
class VisibleTiles {
  const Params& p_;
  const int b_, first_own_, own_count_;
  int first_tile_ = 0, next_tile_ = 0, end_;  // first_tile_: what the lowest bits stand for
  struct Bits {
    unsigned visible, partial;
  } found_ = {};

 public:
  FASTATTN_DEVICE VisibleTiles(const Params& p, int b, int first_own, int own_count)
      : p_(p), b_(b), first_own_(first_own), own_count_(own_count) {
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

  // Leaves only tiles among the `count` others from `first` on, which are whole tiles; before any is asked for.
  FASTATTN_DEVICE void keep(int first, int count) {
    next_tile_ = greater(next_tile_, first / kOthers);
    end_ = lesser(end_, (first + count) / kOthers);
  }

  // Stores the next tile; false where there is none. All threads of a warp must call it.
  FASTATTN_DEVICE bool next(VisibleTile& tile) {
    while (found_.visible == 0) {
      if (next_tile_ >= end_) return false;
      found_ = find(p_, b_, first_own_, own_count_, next_tile_, end_);
      first_tile_ = next_tile_;
      next_tile_ += kWarp;
    }
    const int i = __ffs(found_.visible) - 1;
    found_.visible &= found_.visible - 1;
    tile = {(first_tile_ + i) * kOthers, (found_.partial >> i & 1) != 0};
    return true;
  }

 private:
  template <bool kQueries>
  FASTATTN_HD static const Side& side(const Params& p) {
    return kQueries ? p.queries : p.keys;
  }

  // Which of the tiles from `next_tile` on are visible, and which of those partial, a bit each. It is not inlined: it
  // runs rarely, and would take registers from the loop of a kernel.
  FASTATTN_COLD static Bits find(const Params& p, int b, int first_own, int own_count, int next_tile, int end) {
    const int tile = next_tile + lane();
    TileKind kind = TileKind::skipped;
    if (tile < end) {
      const Tokens own = side<kOwnAreQueries>(p).tokens(b, first_own, own_count);
      const Tokens other = side<!kOwnAreQueries>(p).tokens(b, tile * kOthers, kOthers);
      kind = kOwnAreQueries ? tile_kind(own, other, p.band) : tile_kind(other, own, p.band);
      if (kind == TileKind::full && p.dense.data) kind = TileKind::partial;
    }
    return {__ballot_sync(~0u, kind != TileKind::skipped), __ballot_sync(~0u, kind == TileKind::partial)};
  }
};

}  // namespace fastattn::cuda

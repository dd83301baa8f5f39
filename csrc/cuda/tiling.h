// Tile sizes: every number that depends on the hardware.
#pragma once

#include "tile.cuh"
#include "seen.cuh"

namespace fastattn::cuda {

// A block of kWarps warps takes 16 kRowBlocks rows each, and kColumns rows of the other side at a time.
template <class Element_, int kHeadDim_, int kWarps_, int kRowBlocks_, int kColumns_>
struct Tiling {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_, kWarps = kWarps_, kRowBlocks = kRowBlocks_, kColumns = kColumns_;
  static constexpr int kThreads = kWarp * kWarps, kRows = 16 * kRowBlocks * kWarps;
};

}  // namespace fastattn::cuda

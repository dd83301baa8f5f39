// What a test chooses of the GPU that is modelled, and what it is told about a launch.
#pragma once

#include <cstdint>
#include <stdexcept>

// Compute capability times ten: 75 has no asynchronous copies and no bf16 on tensor cores.
#ifndef FASTATTN_MODEL_CAPABILITY
#define FASTATTN_MODEL_CAPABILITY 80
#endif

namespace fastattn::cuda::model {

constexpr int kCapability = FASTATTN_MODEL_CAPABILITY;
constexpr bool kCopiesLater = kCapability >= 80;

// What a kernel must not do: a GPU would do anything then.
struct Mistake : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// In which order threads, warps and blocks run that do not wait for each other. A kernel whose results depend on it has
// a race. `random` also runs another warp at each instruction that the lanes of a warp do together.
enum class Order { ascending, descending, random };

struct Settings {
  Order order = Order::ascending;
  uint64_t seed = 1;                                                // of the random order
  int64_t shared_bytes = kCapability >= 80 ? 163 << 10 : 64 << 10;  // that a block may have
};
inline Settings settings;

struct Counters {
  int64_t products = 0;        // multiply_add, of a warp
  int64_t loads = 0;           // load_matrices and load_transposed, of a warp; 4 wavefronts each
  int64_t load_conflicts = 0;  // wavefronts of theirs beyond those
  int64_t copies = 0;          // copy_16_bytes, of 8 lanes together: a wavefront each
  int64_t copy_conflicts = 0;  // wavefronts of theirs beyond those
  int64_t barriers = 0;        // __syncthreads, of a block
  int64_t switches = 0;        // from one lane to the next

  void operator+=(const Counters& others) {
    products += others.products, loads += others.loads, load_conflicts += others.load_conflicts;
    copies += others.copies, copy_conflicts += others.copy_conflicts;
    barriers += others.barriers, switches += others.switches;
  }
};
// Of all launches since a test last set it to {}.
inline Counters counters;

}  // namespace fastattn::cuda::model

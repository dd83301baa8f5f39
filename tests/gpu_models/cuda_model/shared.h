// The shared memory of a block: of exactly the size of the launch, NaN in every byte until it is written.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <string>

#include "../../cpu_kernels/guarded.h"
#include "settings.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace fastattn::cuda::model {

constexpr int kRowBytes = 16;          // of a row of load_matrices, and of copy_16_bytes
constexpr int kRowsTogether = 8;       // that the banks serve in a wavefront, if no two lie in the same ones
constexpr int kSharedAlignment = 128;  // all 32 banks of 4 bytes

class Shared {
 public:
  explicit Shared(int bytes)
      : bytes_(bytes), memory_(kPlacement, (bytes / kSharedAlignment + 1) * kSharedAlignment, kSharedAlignment) {
#if defined(__SANITIZE_ADDRESS__)
    __asan_poison_memory_region(data() + bytes_, memory_.size() - bytes_);
#endif
  }
#if defined(__SANITIZE_ADDRESS__)
  ~Shared() { __asan_unpoison_memory_region(data(), memory_.size()); }
#endif

  char* data() const { return memory_.data(); }

  void forget() { std::memset(data(), test::Buffer::kUntouched, bytes_); }

  bool kept_inside() const {
    return kPlacement == test::Placement::heap ||
           (memory_.untouched(bytes_, memory_.size()) && memory_.surroundings_untouched());
  }

  // Where these 16 bytes begin.
  int row(const void* address, const char* instruction) const {
    const int64_t offset = static_cast<const char*>(address) - data();
    if (offset < 0 || offset + kRowBytes > bytes_) {
      throw Mistake(std::string(instruction) + " of byte " + std::to_string(offset) + " of " + std::to_string(bytes_) +
                    " bytes of shared memory");
    }
    if (offset % kRowBytes != 0) {
      throw Mistake(std::string(instruction) + " of byte " + std::to_string(offset) +
                    " of shared memory, which is not a multiple of 16");
    }
    return static_cast<int>(offset);
  }

 private:
#if defined(__SANITIZE_ADDRESS__)
  static constexpr test::Placement kPlacement = test::Placement::heap;
#else
  static constexpr test::Placement kPlacement = test::Placement::before_guard;
#endif
  int bytes_;
  test::Buffer memory_;
};

constexpr int kNoRow = -1;

// Wavefronts beyond one that the banks need for 8 rows of 16 bytes. A row has 4 of the 32 banks; rows that are the same
// one are served together.
inline int extra_wavefronts(const int* rows) {
  int most = 1;
  std::array<int, kRowsTogether> of_banks{};
  for (int i = 0; i < kRowsTogether; ++i) {
    bool served = rows[i] == kNoRow;
    for (int j = 0; j < i; ++j) served = served || rows[j] == rows[i];
    if (!served) most = std::max(most, ++of_banks[rows[i] / kRowBytes % kRowsTogether]);
  }
  return most - 1;
}

}  // namespace fastattn::cuda::model

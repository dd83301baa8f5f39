// 16-bit elements as they lie in memory. fp32 is float.
#pragma once

#include <cstdint>

namespace fastattn::cuda {

struct f16 {
  uint16_t bits;
};
struct bf16 {
  uint16_t bits;
};

}  // namespace fastattn::cuda

// The dtypes of q, k and v.
#pragma once

#include <cstdint>

namespace fastattn {

enum class DType { f32, bf16, f16 };

inline int64_t bytes_of(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

}  // namespace fastattn

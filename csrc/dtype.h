// The dtypes of q, k and v; and int8, which keys and values on pages may have.
#pragma once

#include <cstdint>

namespace fastattn {

enum class DType { f32, bf16, f16, i8 };

inline int64_t bytes_of(DType dtype) { return dtype == DType::f32 ? 4 : dtype == DType::i8 ? 1 : 2; }

}  // namespace fastattn

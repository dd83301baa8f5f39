// The dtype of a tensor, for the bindings.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include "dtype.h"

namespace fastattn {

inline DType dtype_of(const at::Tensor& x) {
  switch (x.scalar_type()) {
    case at::kFloat:
      return DType::f32;
    case at::kBFloat16:
      return DType::bf16;
    case at::kHalf:
      return DType::f16;
    default:
      TORCH_CHECK_NOT_IMPLEMENTED(false, "tensors must be float32, bfloat16 or float16, got ", x.scalar_type());
  }
}

}  // namespace fastattn

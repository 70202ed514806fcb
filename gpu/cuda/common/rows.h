// Rows of one token in device memory, as callers have them: any dtype, heads at a stride.
#pragma once

#include <cstddef>

#include "cpu/types.h"

namespace keyhole::gpu {

/// What a kernel reads; data null: none.
struct InputRows {
  const void* data = nullptr;
  size_t head_stride = 0;  ///< elements
  DType dtype = DType::f16;
};

/// What a kernel writes.
struct OutputRows {
  void* data = nullptr;
  size_t head_stride = 0;  ///< elements
  DType dtype = DType::f16;
};

}  // namespace keyhole::gpu

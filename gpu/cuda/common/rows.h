// Rows of one token or several in device memory, as callers have them: any dtype, heads and tokens at a stride.
#pragma once

#include <cstddef>

#include "cpu/types.h"
#include "gpu/step.h"

namespace keyhole::gpu {

/// Rows that a kernel reads; data null: none.
struct InputRows {
  const void* data = nullptr;
  size_t head_stride = 0;  ///< elements
  DType dtype = DType::f16;
  size_t token_stride = 0;  ///< elements; where there are several tokens
};

/// Rows that a kernel writes.
struct OutputRows {
  void* data = nullptr;
  size_t head_stride = 0;  ///< elements
  DType dtype = DType::f16;
  size_t token_stride = 0;  ///< elements; where there are several tokens
};

[[nodiscard]] inline InputRows input_of(const DeviceRows& rows) {
  return {rows.data, rows.head_stride, rows.dtype};
}
[[nodiscard]] inline InputRows input_of(const DeviceTokens& rows) {
  return {rows.data, rows.head_stride, rows.dtype, rows.token_stride};
}
[[nodiscard]] inline OutputRows output_of(const DeviceRows& rows) {
  return {rows.data, rows.head_stride, rows.dtype};
}
[[nodiscard]] inline OutputRows output_of(const DeviceTokens& rows) {
  return {rows.data, rows.head_stride, rows.dtype, rows.token_stride};
}

}  // namespace keyhole::gpu

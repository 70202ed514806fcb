// Rows in int8 with a bf16 scale for each channel of a block (RowScales of cpu/types.h): loads and conversions. An
// int8 number times its scale is exact in fp32, so that results made of rows have the bits of the host.
#pragma once

#include "gpu/cuda/common/element.cuh"

namespace keyhole::gpu::codes {

__device__ inline float scale_of(uint16_t bf16) {
  return __uint_as_float(static_cast<uint32_t>(bf16) << 16U);
}

/// Loads element `at` of a row of any dtype; of i8, the number without its scale.
__device__ inline float load_number(const void* row, DType dtype, size_t at) {
  if (dtype == DType::i8) return static_cast<float>(static_cast<const int8_t*>(row)[at]);
  return load_element(row, dtype, at);
}

/// Loads components 4 quad .. 4 quad + 3 of an int8 row, and behind them their scales, which begin at `scales`.
__device__ inline RawQuad load_int8(const std::byte* row, const uint16_t* scales, uint32_t quad) {
  const uint2 two = reinterpret_cast<const uint2*>(scales)[quad];
  return {{reinterpret_cast<const uint32_t*>(row)[quad], two.x, two.y, 0}};
}

/// Converts the result of load_int8(), or of load_raw() for another dtype, to fp32.
__device__ inline void convert_row(const RawQuad& raw, DType dtype, float (&x)[4]) {
  if (dtype != DType::i8) return convert(raw, dtype, x);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const auto number = static_cast<int8_t>(raw.words[0] >> (8 * i));
    const auto scale = static_cast<uint16_t>(raw.words[1 + i / 2] >> (i % 2 * 16));
    x[i] = static_cast<float>(number) * scale_of(scale);
  }
}

}  // namespace keyhole::gpu::codes

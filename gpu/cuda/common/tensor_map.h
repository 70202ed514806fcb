// Descriptions of tensors in device memory for the copy engine.
#pragma once

#include <cuda.h>

#include <array>
#include <cstddef>
#include <cstdint>

namespace keyhole::gpu {

/// A tensor of three dimensions of 16-bit elements, x without gaps, and the box that a copy takes. The x of a box lie
/// in 128 bytes of shared memory with the swizzle of 128 bytes (gpu/cuda/common/wgmma.cuh).
struct BoxedTensor {
  const void* data = nullptr;         ///< aligned to 16 bytes
  std::array<uint64_t, 3> sizes{};    ///< 1..2^32 each
  std::array<uint64_t, 2> strides{};  ///< bytes from y to y and from z to z, multiples of 16
  std::array<uint32_t, 3> box{};      ///< 1..256 each, x <= 64
  bool is_bf16 = false;               ///< else fp16
};

/// Makes the map. Throws Error: unsupported (the driver is too old to make one), device_error (it refuses the
/// tensor).
[[nodiscard]] CUtensorMap make_tensor_map(const BoxedTensor& tensor);

}  // namespace keyhole::gpu

// What the lanes of a warp have for each query row, sent to one lane of each.
#pragma once

#include <cstdint>

#include "gpu/cuda/common/warp.cuh"

namespace keyhole::gpu::codes {

/// Sends values of kCount tiles of 4 heads to single lanes, combining those of the 8 lanes with the same lane % 4: lane
/// l gets the one of head l, in v[0], or of the tile below if `lanes_of_tile` is 2 or 4.
template <int kCount, class Combine>
__device__ __forceinline__ float combined_rows(const float (&x)[kCount], const Combine& combine) {
  constexpr int kSlots = kCount <= 2 ? 2 : kCount <= 4 ? 4 : 8;
  static_assert(kCount <= 8);
  float v[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) v[i] = x[i];
  const uint32_t lane = threadIdx.x % 32;
  int bit = 16;
#pragma unroll
  for (int width = kSlots; width > 1; width /= 2) {
    const bool upper = (lane & static_cast<uint32_t>(bit)) != 0;
#pragma unroll
    for (int i = 0; i < width / 2; ++i) {
      if (i + width / 2 >= kCount) {
        // Lanes of a tile that is not there get what others have.
        if (i < kCount) v[i] = combine(v[i], __shfl_xor_sync(kWholeWarp, v[i], bit));
        continue;
      }
      const float send = upper ? v[i] : v[i + width / 2], own = upper ? v[i + width / 2] : v[i];
      v[i] = combine(own, __shfl_xor_sync(kWholeWarp, send, bit));
    }
    bit /= 2;
  }
#pragma unroll
  for (int left = kSlots; left < 8; left *= 2) {
    v[0] = combine(v[0], __shfl_xor_sync(kWholeWarp, v[0], bit));
    bit /= 2;
  }
  return v[0];
}
/// The row whose value combined_rows() leaves in this lane; kCount * 4 where it is another lane's.
template <int kCount>
__device__ inline int combined_row(int lane) {
  constexpr int kSlots = kCount <= 2 ? 2 : kCount <= 4 ? 4 : 8;
  constexpr int kLanes = 8 / kSlots;  // that have the same
  const int slot = lane / 4 / kLanes;
  return lane / 4 % kLanes == 0 && slot < kCount ? 4 * slot + lane % 4 : 4 * kCount;
}

}  // namespace keyhole::gpu::codes

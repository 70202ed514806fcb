// The phases of a second look at codes, and the shared memory of a thread block that they use in turn.
#pragma once

#include "gpu/cuda/codes/settle_merge.cuh"
#include "gpu/cuda/codes/settle_rows.cuh"

namespace keyhole::gpu::codes {

/// Dynamic shared memory of all phases.
template <int kDim, int kBits>
constexpr size_t settle_shared() {
  const size_t sizes[] = {
      sizeof(WarpStates<kDim>), sizeof(FoundShared<kDim>), sizeof(MergeShared<kDim>),
      kLeastRings<kDim, kBits> + (kLooksAlone<kDim> ? sizeof(AttendShared<kDim, kBits, 1>) : 0)};
  size_t most = 0;
  for (const size_t size : sizes) most = size > most ? size : most;
  return most;
}

}  // namespace keyhole::gpu::codes

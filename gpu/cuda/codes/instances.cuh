// The kernels of one number of bits: instances_<bits>.cu.
#pragma once

#include "gpu/cuda/codes/attend.cuh"
#include "gpu/cuda/codes/finish.cuh"
#include "gpu/cuda/codes/finish_single.cuh"

namespace keyhole::gpu::codes {

template <int kDim, int kBits, int kHeadTiles>
Kernels kernels() {
  return {reinterpret_cast<const void*>(&attend_kernel<kDim, kBits, kBits, kHeadTiles>),
          attend_resident<kDim, kHeadTiles>(),
          sizeof(WarpStates<kDim>),
          size_t{kAttendWarps} * TilePair<kDim, kBits, kBits>::kBytes,
          reinterpret_cast<const void*>(&finish_kernel<kDim, kBits, kBits, kHeadTiles>),
          sizeof(FinishShared<kDim, kBits, kHeadTiles>),
          reinterpret_cast<const void*>(&finish_single_kernel<kDim, kBits, kBits, kHeadTiles>),
          sizeof(SingleShared<kDim, kBits, kHeadTiles>)};
}

template <int kDim, int kBits>
Kernels kernels_for_group(uint32_t group) {
  if (group <= 4) return kernels<kDim, kBits, 1>();
  if (group <= 8) return kernels<kDim, kBits, 2>();
  return kernels<kDim, kBits, 4>();
}

template <int kBits>
Kernels kernels_for(uint32_t dim, uint32_t group) {
  switch (dim) {
    case 64: return kernels_for_group<64, kBits>(group);
    case 80: return kernels_for_group<80, kBits>(group);
    case 96: return kernels_for_group<96, kBits>(group);
    case 128: return kernels_for_group<128, kBits>(group);
    default: return {};
  }
}

}  // namespace keyhole::gpu::codes

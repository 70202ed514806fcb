// The kernels of one number of bits, instances_<bits>.cu; of heads of 256 components, instances_256.cu; of values that have
// other bits than keys, instances_unequal_<bits of keys>.cu.
#pragma once

#include "gpu/cuda/codes/attend.cuh"
#include "gpu/cuda/codes/finish.cuh"
#include "gpu/cuda/codes/finish_single.cuh"

namespace keyhole::gpu::codes {

/// kAttendTiles: tiles of 4 heads that a thread block of the pass has registers for; others of the group are other blocks'.
template <int kDim, int kKeyBits, int kValueBits, int kHeadTiles, int kAttendTiles = kHeadTiles>
Kernels kernels() {
  static_assert(kHeadTiles % kAttendTiles == 0);
  static_assert(kAttendTiles == kHeadTiles || kDividesGroup<kDim, kKeyBits, kValueBits>);
  constexpr int kFinishBits = kKeyBits == kValueBits ? kValueBits : kAnyBits;
  Kernels k;
  k.attend =
      reinterpret_cast<const void*>(&attend_kernel<kDim, kKeyBits, kValueBits, kAttendTiles>);
  k.attend_warps = kAttendWarps<kDim>;
  k.attend_heads = 4 * kAttendTiles;
  k.attend_resident = attend_resident<kDim, kKeyBits, kValueBits, kAttendTiles>();
  k.attend_fixed = attend_fixed<kDim, kKeyBits, kAttendTiles>();
  k.attend_shared = sizeof(WarpStates<kDim>);
  k.attend_stage = size_t{kAttendWarps<kDim>} * TilePair<kDim, kKeyBits, kValueBits>::kBytes;
  k.finish = reinterpret_cast<const void*>(&finish_kernel<kDim, kKeyBits, kFinishBits, kHeadTiles>);
  k.finish_shared = sizeof(FinishShared<kDim, kKeyBits, kHeadTiles>);
  k.finish_single =
      reinterpret_cast<const void*>(&finish_single_kernel<kDim, kKeyBits, kFinishBits, kHeadTiles>);
  k.single_shared = sizeof(SingleShared<kDim, kKeyBits, kHeadTiles>);
  k.heads = 4 * kHeadTiles;
  return k;
}

template <int kDim, int kKeyBits, int kValueBits = kKeyBits>
Kernels kernels_for_group(uint32_t group) {
  if (group <= 4) return kernels<kDim, kKeyBits, kValueBits, 1>();
  if (group <= 8) return kernels<kDim, kKeyBits, kValueBits, 2>();
  return kernels<kDim, kKeyBits, kValueBits, 4,
                 kDividesGroup<kDim, kKeyBits, kValueBits> ? 2 : 4>();
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

/// Values of other bits than keys.
template <int kKeyBits, int kValueBits>
Kernels unequal_kernels_for(uint32_t dim, uint32_t group) {
  switch (dim) {
    case 64: return kernels_for_group<64, kKeyBits, kValueBits>(group);
    case 128: return kernels_for_group<128, kKeyBits, kValueBits>(group);
    case 256: return kernels_for_group<256, kKeyBits, kValueBits>(group);
    default: return {};
  }
}

}  // namespace keyhole::gpu::codes

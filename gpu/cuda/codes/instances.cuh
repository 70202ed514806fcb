// Instantiates the kernels of one head dimension, for instances_<dimension>.cu: the dimensions have about as many
// each.
#pragma once

#include <algorithm>

#include "gpu/codes_layout.h"
#include "gpu/cuda/codes/attend.cuh"
#include "gpu/cuda/codes/finish_parts.cuh"
#include "gpu/cuda/codes/finish_single.cuh"

namespace keyhole::gpu::codes {

/// Shared memory of the pass over codes with the fewest stages.
template <int kDim, int kBits, int kAttendTiles>
constexpr size_t kLeastAttend =
    attend_fixed<kDim, kBits, kAttendTiles>() + std::max(sizeof(WarpStates<kDim>),
                                                         kLeastStages* size_t{kAttendWarps<kDim>} *
                                                             TilePair<kDim, kBits>::kBytes);

/// kAttendTiles: tiles of 4 heads that a thread block of the pass has registers for; other blocks have the others of
/// the group.
template <int kDim, int kBits, int kHeadTiles, int kAttendTiles = kHeadTiles>
Kernels kernels() {
  static_assert(kHeadTiles % kAttendTiles == 0);
  static_assert(kAttendTiles == kHeadTiles || kDividesGroup<kDim>);
  // What plans of lists go by, on devices of 99, 163 and 227 KiB.
  constexpr size_t kFinish =
      settle_fixed<kDim, kBits>() + sizeof(FinishShared<kDim, kBits, kHeadTiles>);
  static_assert(kFinish <= finish_bytes(kDim, 4 * kHeadTiles), "finish_bytes() is to be raised");
  static_assert(kFinish + 1024 > finish_bytes(kDim, 4 * kHeadTiles),
                "finish_bytes() is to be lowered");
  constexpr size_t kLeast = size_t{99} << 10U;
  static_assert(settle_fixed<kDim, kBits>() + settle_shared<kDim, kBits>() <= kLeast);
  static_assert(kLeastAttend<kDim, kBits, kAttendTiles> <= kLeast || kFinish > kLeast);
  // As narrow_heads() divides a group.
  constexpr int kTilesWithLists = std::min(kAttendTiles, static_cast<int>(narrow_heads(kDim)) / 4);
  constexpr size_t kWithLists = kLeastAttend<kDim, kBits, kTilesWithLists>;
  static_assert(kWithLists <= lone_bytes(kDim, 4 * kHeadTiles) || kLooksAlone<kDim>,
                "lone_bytes() is to be raised");
  static_assert(kFinishBlocks == kChoosingBlocks && kFinishThreads == kChoosingThreads);
  Kernels k;
  k.attend = reinterpret_cast<const void*>(&attend_kernel<kDim, kBits, kAttendTiles>);
  k.attend_lists = reinterpret_cast<const void*>(&attend_lists_kernel<kDim, kBits, kAttendTiles>);
  k.attend_warps = kAttendWarps<kDim>;
  k.attend_heads = 4 * kAttendTiles;
  k.attend_occupancy = attend_occupancy<kDim, kBits, kAttendTiles>();
  k.attend_fixed = attend_fixed<kDim, kBits, kAttendTiles>();
  k.attend_shared = sizeof(WarpStates<kDim>);
  k.attend_stage = size_t{kAttendWarps<kDim>} * TilePair<kDim, kBits>::kBytes;
  k.finish = reinterpret_cast<const void*>(&finish_kernel<kDim, kBits, kHeadTiles>);
  k.finish_parts = reinterpret_cast<const void*>(&finish_parts_kernel<kDim, kBits, kHeadTiles>);
  k.finish_shared = sizeof(FinishShared<kDim, kBits, kHeadTiles>);
  k.settle_shared = settle_shared<kDim, kBits>();
  k.finish_single = reinterpret_cast<const void*>(&finish_single_kernel<kDim, kBits, kHeadTiles>);
  k.finish_single_parts =
      reinterpret_cast<const void*>(&finish_single_parts_kernel<kDim, kBits, kHeadTiles>);
  k.single_shared = sizeof(SingleShared<kDim, kBits, kHeadTiles>);
  k.heads = 4 * kHeadTiles;
  return k;
}

template <int kDim, int kBits>
Kernels kernels_for_group(uint32_t group) {
  if (group <= 4) return kernels<kDim, kBits, 1>();
  if (group <= 8) return kernels<kDim, kBits, 2>();
  constexpr int kAttendTiles = kDividesGroup<kDim> ? 2 : 4;
  return kernels<kDim, kBits, 4, kAttendTiles>();
}

template <int kDim>
Kernels kernels_for(uint32_t bits, uint32_t group) {
  switch (bits) {
    case 2: return kernels_for_group<kDim, 2>(group);
    case 4: return kernels_for_group<kDim, 4>(group);
    default: return {};
  }
}

}  // namespace keyhole::gpu::codes

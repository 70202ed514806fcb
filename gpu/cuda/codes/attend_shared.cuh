// The shared memory of the pass over all codes (gpu/cuda/codes/attend.cuh), and how many of its thread blocks it leaves
// room for.
#pragma once

#include "gpu/cuda/codes/params.h"
#include "gpu/cuda/codes/queries.cuh"
#include "gpu/cuda/codes/resident_rows.cuh"
#include "gpu/cuda/codes/tile_ring.cuh"

namespace keyhole::gpu::codes {

/// The states of the warps, four heads at a time; they take the place of the rings. A row is longer than its
/// contents, so that the four heads of a warp lie in different banks.
template <int kDim>
struct WarpStates {
  float o[kAttendWarps<kDim>][4][kDim + 8];
};

/// How many thread blocks share a multiprocessor. One block of 16 warps in place of two of 8 takes 2 us more at 128k:
/// its warps wait for memory, and compute, at the same times. Blocks for 256 components have half as many warps, and
/// where codes are small there is shared memory for three of them.
template <int kDim, int kBits, int kHeadTiles>
constexpr int attend_occupancy() {
  if (kDim > 128) return kHeadTiles == 1 && kBits == 2 ? 3 : 2;
  return kHeadTiles <= 2 ? 2 : 1;
}

/// Whether a pass is a second look alone, at rows of more components than a warp has registers for. It is part of
/// kernels that need all shared memory for other things before, and 99 KiB have to be enough for it: so AttendShared
/// lies behind the rings, these have one stage, and half as many resident rows are at hand.
template <int kDim>
constexpr bool kLooksAlone = kDim > 256;
template <int kDim>
constexpr int kFewestStages = kLooksAlone<kDim> ? 1 : kLeastStages;
template <int kDim>
constexpr uint32_t kResidentAtHand = kResidentBytes<kDim> / (kLooksAlone<kDim> ? 2 : 1);

/// Shared memory of attend() beside the rings.
template <int kDim, int kBits, int kHeadTiles>
struct AttendShared {
  SharedQueries<kDim, kBits, kHeadTiles> queries;
  ResidentShared<kDim, 4 * kHeadTiles, kResidentAtHand<kDim>> resident;
  float max[kAttendWarps<kDim>][4 * kHeadTiles], sum[kAttendWarps<kDim>][4 * kHeadTiles];
};
/// Bytes of shared memory that attend_kernel() declares.
template <int kDim, int kBits, int kHeadTiles>
constexpr size_t attend_fixed() {
  return sizeof(AttendShared<kDim, kBits, kHeadTiles>);
}

/// Bytes of the rings of a thread block with the fewest stages.
template <int kDim, int kBits>
constexpr size_t kLeastRings =
    kFewestStages<kDim>* size_t{kAttendWarps<kDim>} * TilePair<kDim, kBits>::kBytes;

template <int kDim, int kBits, int kHeadTiles>
__device__ inline AttendShared<kDim, kBits, kHeadTiles>& attend_shared(unsigned char* memory) {
  using Shared = AttendShared<kDim, kBits, kHeadTiles>;
  if constexpr (kLooksAlone<kDim>) {
    static_assert(sizeof(WarpStates<kDim>) <= kLeastRings<kDim, kBits>);
    return *reinterpret_cast<Shared*>(memory + kLeastRings<kDim, kBits>);
  } else {
    __shared__ alignas(16) unsigned char shared[sizeof(Shared)];
    return *reinterpret_cast<Shared*>(shared);
  }
}

}  // namespace keyhole::gpu::codes

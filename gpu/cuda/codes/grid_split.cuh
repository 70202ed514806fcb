// Which part of a layer's codes a thread block has in a launch of one step.
#pragma once

#include "gpu/cuda/codes/params.h"
#include "gpu/cuda/codes/resident_rows.cuh"

namespace keyhole::gpu::codes {

/// The split of a thread block in a launch of one step.
struct GridSplit {
  template <int kDim, int kHeadTiles>
  using Resident = ResidentShare<kDim, kHeadTiles>;
  static constexpr bool kFinds = false;  ///< see DoubtSplit of gpu/cuda/codes/settle_find.cuh
  static constexpr bool kOnce = true;    ///< see TileRing
  static constexpr bool kLists = false;  ///< see ListSplit

  __device__ static uint32_t kv_head() { return blockIdx.y; }
  __device__ static uint32_t number() { return blockIdx.x; }
  __device__ static uint32_t count() { return gridDim.x; }
  /// The split's place among the states that are merged.
  __device__ static uint32_t place() { return blockIdx.x; }
  /// The first of the blocks of codes that all splits attend together.
  __device__ static uint32_t first_block() { return 0; }
  __device__ static uint32_t end_block(const CodesParams& s) { return __ldcv(s.block_count); }
};

/// GridSplit of a step with lists: the splits read the pairs of the table that the choice has left, and attend the
/// other lists by their means.
struct ListSplit {
  template <int kDim, int kHeadTiles>
  using Resident = ResidentShare<kDim, kHeadTiles>;
  static constexpr bool kFinds = false, kLists = true, kOnce = true;

  __device__ static uint32_t kv_head() { return blockIdx.y; }
  __device__ static uint32_t number() { return blockIdx.x; }
  __device__ static uint32_t count() { return gridDim.x; }
  __device__ static uint32_t place() { return blockIdx.x; }
};

}  // namespace keyhole::gpu::codes

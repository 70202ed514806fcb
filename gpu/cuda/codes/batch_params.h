// What the kernels of steps of several sessions in one launch are told.
#pragma once

#include "gpu/cuda/codes/params.h"

namespace keyhole::gpu::codes {

/// Members are any number up to kMostJointSteps; they have the kernels, the KV heads and the stages in common.
struct BatchParams {
  CodesParams steps[kMostJointSteps];
  /// What a member's resident tokens cost, in blocks of codes that take as long.
  uint32_t resident_cost[kMostJointSteps] = {};
  uint32_t count = 0;  ///< of members
  uint32_t blocks =
      0;  ///< thread blocks of the pass that a KV head of all members has; no fewer than members
};
// All of it is a parameter: CUDA 12.1 or newer takes as much on GPUs of compute capability 7.0 or newer.
static_assert(sizeof(BatchParams) <= 32764);
static_assert(kMostJointSteps <= 32, "a lane counts a member's blocks");

/// A row of resident tokens takes about as long as so many rows of codes (gpu/cuda/codes/resident_warps.cuh): fp32 in the place of
/// tensor cores, and 4 to 8 times the bytes. An estimate: it only says how thread blocks are shared.
inline constexpr uint32_t kResidentRowCost = 4;

}  // namespace keyhole::gpu::codes

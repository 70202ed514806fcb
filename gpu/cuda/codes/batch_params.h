// What the kernels of steps of several sessions in one launch are told.
#pragma once

#include "gpu/cuda/codes/params.h"

namespace keyhole::gpu::codes {

/// Members are any number up to kMostJointSteps; they have the kernels, the KV heads and the stages in common.
/// Members that attend the same codes in their first blocks, which one thread block of the pass attends for all of them.
struct Family {
  static constexpr uint32_t kMost = 4;
  uint8_t count = 0;
  uint8_t members[kMost] = {};
};
inline constexpr uint8_t kNoFamily = 0xFF;

struct BatchParams {
  CodesParams steps[kMostJointSteps];
  /// What a member's resident tokens cost, in blocks of codes that take as long.
  uint32_t resident_cost[kMostJointSteps] = {};
  uint32_t count = 0;  ///< of members
  uint32_t blocks =
      0;  ///< thread blocks of the pass that a KV head of all members has; no fewer than members
  Family families[kMostJointSteps / 2];
  uint8_t family_of[kMostJointSteps] = {};  ///< kNoFamily: none
  uint32_t family_count = 0;
  uint32_t family_blocks =
      0;  ///< thread blocks of their pass that a KV head has; no fewer than families
};
// All of it is a parameter: CUDA 12.1 or newer takes as much on GPUs of compute capability 7.0 or newer.
static_assert(sizeof(BatchParams) <= 32764);
static_assert(kMostJointSteps <= 32, "a lane counts a member's blocks");

/// A row of resident tokens takes about as long as so many rows of codes (gpu/cuda/codes/resident_warps.cuh): fp32 in the place of
/// tensor cores, and 4 to 8 times the bytes. An estimate: it only says how thread blocks are shared.
inline constexpr uint32_t kResidentRowCost = 4;

/// Divides the members among families: those with the same CodesStep::family, up to `most` together, as many in each as can be
/// or one less; one alone is in none.
void find_families(BatchParams& batch, uint32_t most);

}  // namespace keyhole::gpu::codes

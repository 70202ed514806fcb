// Parameters of the kernels that make the steps of several sessions in one launch.
#pragma once

#include "gpu/cuda/codes/params.h"

namespace keyhole::gpu::codes {

/// Members that attend the same codes in their first blocks; one thread block of the pass attends these for all of
/// them.
struct Family {
  static constexpr uint32_t kMost = 4;
  uint8_t count = 0;
  uint8_t members[kMost] = {};
};
inline constexpr uint8_t kNoFamily = 0xFF;

/// The steps of a launch. There are up to kMostJointSteps members, with the same kernels, KV heads and stages.
struct BatchParams {
  CodesParams steps[kMostJointSteps];
  /// The cost of a member's resident tokens, in blocks of codes that take as long.
  uint32_t resident_cost[kMostJointSteps] = {};
  uint32_t count = 0;  ///< number of members
  uint32_t blocks =
      0;  ///< thread blocks of the pass that a KV head of all members has; no fewer than members
  Family families[kMostJointSteps / 2];
  uint8_t family_of[kMostJointSteps] = {};  ///< kNoFamily: none
  uint32_t family_count = 0;
  uint32_t family_blocks =
      0;  ///< thread blocks of their pass that a KV head has; no fewer than families
};
// All of this is one parameter: CUDA 12.1 or newer takes as much on GPUs of compute capability 7.0 or newer.
static_assert(sizeof(BatchParams) <= 32764);
static_assert(kMostJointSteps <= 32, "a lane counts a member's blocks");

/// A row of resident tokens takes about as long as this many rows of codes (gpu/cuda/codes/resident_warps.cuh): it is
/// computed in fp32 without tensor cores, and has 4 to 8 times the bytes. An estimate, which only decides how thread
/// blocks are shared.
inline constexpr uint32_t kResidentRowCost = 4;

/// Divides the members among families: members with the same CodesStep::family, up to `most` in a family. The
/// families of one value differ by at most one member; a member alone is in none.
void find_families(BatchParams& batch, uint32_t most);

}  // namespace keyhole::gpu::codes

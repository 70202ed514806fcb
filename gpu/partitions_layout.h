// How a Partitions's memory on a device is divided: what plans count and CudaPartitions allocates. Offsets are bytes
// into one allocation, each a multiple of 256.
#pragma once

#include "gpu/partitions.h"

namespace keyhole::gpu {

/// Partitions whose weights share a shift: those of one block of the kernel that scores them.
inline constexpr uint32_t kPartitionTile = 512;

/// Most partitions that are chosen for a KV head.
inline constexpr uint32_t kMostChosen = 1024;

/// Most parts that a head's tail is summed in.
inline constexpr uint32_t kMostSplits = 64;

/// Elements per partition in which weights of a group lie: the next power of two.
[[nodiscard]] constexpr uint32_t padded_group(uint32_t group) {
  uint32_t padded = 1;
  while (padded < group) padded *= 2;
  return padded;
}

struct PartitionsLayout {
  /// Throws Error(invalid_argument) for a shape that no session has, or whose size exceeds 2^64 - 1.
  explicit PartitionsLayout(const PartitionsShape& shape);

  uint32_t capacity = 0;  ///< partitions of a head: whole tiles
  uint32_t padded = 0;    ///< padded_group()
  // Of all layers.
  size_t heads = 0, codes = 0, sizes = 0, variances = 0, scales = 0, centers = 0, values = 0;
  size_t query_scales = 0;
  // Of the step under way.
  size_t weights = 0, tile_states = 0, factors = 0, log_sums = 0, least_shares = 0;
  size_t keys = 0, chosen_bits = 0, arrivals = 0, tail_arrivals = 0;
  size_t partial_o = 0, partial_sums = 0, tail_o = 0, tail_lse = 0;
  size_t bytes = 0;
};

}  // namespace keyhole::gpu

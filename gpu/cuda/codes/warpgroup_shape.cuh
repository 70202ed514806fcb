// How a thread block of the pass by warpgroups (gpu/cuda/codes/warpgroup.cuh) divides the work and its shared memory,
// and how the threads of a warpgroup wait for each other.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/code_layout.h"
#include "gpu/cuda/codes/queries.cuh"
#include "gpu/cuda/codes/resident_heads.cuh"
#include "gpu/cuda/codes/tile_ring.cuh"
#include "gpu/cuda/codes/warpgroup_states.cuh"

namespace keyhole::gpu::codes {

/// Warpgroups of a thread block: as many as have registers for their sums and scores. Where two thread blocks share a
/// multiprocessor, there are as many warps as in one of four, and no multiprocessor is idle because there are not as
/// many as a multiple of the KV heads.
constexpr int group_count(int dim, int columns) {
  if (dim <= 128) return columns <= 4 ? 2 : 3;
  return columns <= 4 ? 3 : 2;
}
/// Thread blocks that share a multiprocessor.
constexpr int group_occupancy(int dim, int groups) { return dim <= 128 && groups == 2 ? 2 : 1; }

/// Bytes, for each component, of the resident rows at hand: 32 rows of 16 bits, and fewer where these would take the
/// place of a stage.
constexpr uint32_t group_resident_bytes(int dim, int bits, int columns) {
  if (dim <= 128) return 64;
  return columns > 4 ? 32 : columns == 3 && bits == 4 ? 40 : 64;
}

template <int kDim, int kBits, int kColumns, int kGroups>
struct GroupShape {
  static constexpr CodeShape kShape{kDim, kBits, kBits};
  static_assert(kDim % 64 == 0 && kDim <= 256 && kGroups <= 4);
  static_assert(kShape.key_words() == kShape.value_words());
  static constexpr int kHeads = 8 * kColumns, kTiles = 2 * kColumns;  ///< query rows, tiles of 4
  static constexpr int kWarps = 4 * kGroups, kThreads = 32 * kWarps;
  static constexpr int kSteps = kDim / 32;  ///< products of a score
  static constexpr int kOwn = kDim / 64;    ///< products of values of a tile
  /// Products of a score whose codes are in registers at once: where these are scarce half of them.
  static constexpr int kBatch = kDim > 128 && kGroups > 2 ? 4 : kSteps;
  static constexpr int kWords = static_cast<int>(kShape.key_words());  ///< of a lane and tile
  static constexpr uint32_t kPieces = pieces_of(kShape.key_words());
  static constexpr uint32_t kTileBytes = 32 * kWords * 4;
  static constexpr uint32_t kFactorBytes = kCodeTile * 4;  ///< of a tile
  static constexpr uint32_t kValuesAt = 4 * kTileBytes, kFactorsAt = 2 * kValuesAt;
  static constexpr uint32_t kStage = kFactorsAt + 4 * kFactorBytes;  ///< of a turn
  static constexpr uint32_t kStep = kGroups * kStage;                ///< from stage to stage
  static constexpr uint32_t kMeanBytes = 4 * kDim + 16;              ///< both means and the noise
  /// A multiple of what a lane reads of a tile.
  static constexpr uint32_t kMeans = (2 * kGroups * kMeanBytes + 127) / 128 * 128;
  static_assert(kShape.noise_at() - kShape.key_mean_at() == kMeanBytes - 16);
  /// Queries lie as panels of 128 components, two rows of bytes each.
  static constexpr uint32_t kQueryPanel = 2 * kHeads * 128;
  static constexpr uint32_t kQueryPanels = (kDim + 127) / 128;
  static constexpr uint32_t kWeightPanel = kHeads * 128;  ///< bytes: 64 weights of a query row
  static constexpr int kStateRow = kDim + 4;
  static constexpr uint32_t kResidentRowBytes = group_resident_bytes(kDim, kBits, kColumns);
  using Resident = ResidentHeadsShared<kDim, kHeads, kResidentRowBytes>;
  /// combined_rows() takes up to 8 tiles.
  static constexpr int kParts = kTiles > 8 ? 2 : 1, kPartTiles = kTiles / kParts;
};

template <int kDim, int kBits, int kColumns, int kGroups>
struct GroupShared {
  using Shape = GroupShape<kDim, kBits, kColumns, kGroups>;
  static constexpr int kHeads = Shape::kHeads;
  /// Operands of products, as gpu/cuda/common/wgmma.cuh has them.
  alignas(1024) std::byte queries[Shape::kQueryPanels * Shape::kQueryPanel];
  alignas(1024) std::byte weights[kGroups][2][Shape::kWeightPanel];
  /// Of the weights of each pair of tiles, and of these times value factors: 4 high parts, 4 low parts each. The
  /// columns of a panel are the warpgroups', 16 each.
  alignas(1024) std::byte sums[Shape::kWeightPanel];
  alignas(16) float rows[kHeads][kDim];  ///< times scale log2(e)
  /// Of an even block of the warpgroup's and an odd one: slope, offset, noise in base 2 of the query and the block,
  /// logit of the mean.
  alignas(16) float4 heads[kGroups][2][kHeads];
  float top[kGroups][kHeads];       ///< running maxima,
  float keep[kGroups][kHeads];      ///< and what a change of them multiplies sums with
  int largest[kGroups][kHeads];     ///< logits of turns that did not fit, as GroupPass::ordered()
  float total[kGroups][4][kHeads];  ///< sums of weights
  StateSums<kHeads> codes, residents;  ///< of the whole thread block
  HeadConstants constants[kHeads];
};

/// Waits for the threads of the warpgroup; whether any of them says so.
__device__ inline bool any_of_group(int group, bool x) {
  uint32_t y;
  asm volatile(
      "{\n.reg .pred own, all;\nsetp.ne.u32 own, %1, 0;\n"
      "barrier.cta.red.or.pred all, %2, 128, own;\nselp.u32 %0, 1, 0, all;\n}"
      : "=r"(y)
      : "r"(x ? 1U : 0U), "r"(1 + group)
      : "memory");
  return y != 0;
}
__device__ inline void wait_for_group(int group) {
  asm volatile("barrier.cta.sync %0, 128;" ::"r"(1 + group) : "memory");
}
/// Lets the tensor cores see what this thread has written to shared memory, once all have passed a barrier.
__device__ inline void show_operands() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace keyhole::gpu::codes

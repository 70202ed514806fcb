// Shared memory of the kernel that follows the pass over the codes (gpu/cuda/codes/finish.cuh).
#pragma once

#include "gpu/cuda/codes/choose.cuh"
#include "gpu/cuda/codes/exact_rows.cuh"
#include "gpu/cuda/codes/split_sums.cuh"

namespace keyhole::gpu::codes {

/// The most rows that one block reads exactly.
constexpr uint32_t kRowsOfBlock = kMostDeviceRows / kFinishBlocks;
static_assert(kRowsOfBlock <= kFinishWarps, "a warp reads a row");

/// Shared memory of the kernel, without this block's share of the weights of every 32 rows.
template <int kDim, int kBits, int kHeadTiles>
struct FinishShared {
  static constexpr int kHeads = 4 * kHeadTiles;
  static constexpr int kOwn =
      (kHeads + kFinishBlocks - 1) / kFinishBlocks;  ///< heads that a block merges

  SharedQueries<kDim, kBits, kHeadTiles> queries;
  alignas(16) float q[kHeads][kDim];  ///< as they came, times scale log2(e)
  SplitShared<kHeads, kFinishThreads, kFinishBlocks> splits;
  ChoiceShared<kHeads> choice;
  float top[kHeads], total[kHeads], lse[kHeads];  ///< of the codes, base 2
  CodeFigures figures;
  RingState ring;            ///< of the head's resident tokens before the step
  uint32_t reasons[kHeads];  ///< of each head, from the block that merges it: see HeadAsked
  float asked_lse[kOwn];     ///< of the heads that this block merges, likewise

  RowShared<kDim, kHeads, kRowsOfBlock> rows;  ///< that this block reads

  // The splits' sums of the heads that this block merges, from all blocks of the cluster.
  alignas(16) float split_o[kOwn][kDim];
  alignas(16) float coded_o[kFinishBlocks][kOwn][kDim];
  alignas(16) float exact_o[kFinishBlocks][kOwn][kDim];
  float coded_sum[kFinishBlocks][kOwn];
  float exact_max[kFinishBlocks][kOwn];
  float exact_sum[kFinishBlocks][kOwn];
};

}  // namespace keyhole::gpu::codes

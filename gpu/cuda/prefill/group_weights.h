// Weights of blocks for groups of neighbouring queries. Blocks are chosen by them as by the weights of single queries
// (block_choice.h).
//
// MEANS (MInference's block-sparse heads): a group is 64 queries, and their mean is multiplied with the mean of each
// block of 64 rows. A group sees the blocks that begin at or before its last query. The mean of a block that a prompt
// has not filled yet is that of the rows it has.
#pragma once

#include "gpu/cuda/prefill/block_choice.h"

namespace keyhole::gpu {

inline constexpr uint32_t kMeanQueries = 64;  ///< of a group; of a tile there are two

/// Memory for means, as rows of the dtype: `[q_heads, samples, head_dim]` and `[kv_heads, blocks, head_dim]`, aligned
/// to 16 bytes.
struct Means {
  void* queries = nullptr;
  void* rows = nullptr;
};
/// Enqueues the computation of weights by means: weights.stride is kMeanQueries, and sample i is the group of queries
/// from i * stride on. piece: causal, without window and lists.
void launch_mean_weights(const BlockedParams& piece, const SampledWeights& weights,
                         const Means& means, DType dtype, uint32_t head_dim, cudaStream_t stream);

}  // namespace keyhole::gpu

// Weights of blocks for groups of neighbouring queries, beside those of single ones (block_choice.h), which choose the same way.
//
// MEANS (MInference's block-sparse heads): a group is 64 queries, and the mean of them meets the mean of each block of 64 rows.
// A group sees what begins at or before its last query. Means over rows that a prompt does not have yet are over those that it has.
#pragma once

#include "gpu/cuda/prefill/block_choice.h"

namespace keyhole::gpu {

inline constexpr uint32_t kMeanQueries = 64;  ///< of a group; of a tile there are two

/// Memory for means, rows of the dtype: `[q_heads, samples, head_dim]` and `[kv_heads, blocks, head_dim]`, aligned to 16 bytes.
struct Means {
  void* queries = nullptr;
  void* rows = nullptr;
};
/// Enqueues weights of means: weights.stride is kMeanQueries, and sample i the group of queries from i * stride on. piece: causal,
/// without window and lists.
void launch_mean_weights(const BlockedParams& piece, const SampledWeights& weights,
                         const Means& means, DType dtype, uint32_t head_dim, cudaStream_t stream);

}  // namespace keyhole::gpu

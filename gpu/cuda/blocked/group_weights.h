// Weights of blocks for groups of neighbouring queries, beside those of single ones (block_choice.h), which choose the same way.
//
// ANTIDIAGONALS (XAttention): a group is `stride` queries, 8 or 16, and meets groups of as many rows: their logit is the mean over
// the antidiagonal of the little square that they span, the group's last query with its first row and so on, so that every query and
// every row has a part in it. These are products of rows that are `stride` times as long, the queries' in reversed order.
//
// MEANS (MInference's block-sparse heads): a group is 64 queries, and the mean of them meets the mean of each block of 64 rows.
//
// A group sees what begins at or before its last query. Means over rows that a prompt does not have yet are over those that it has;
// a square at the prompt's end counts as if these were 0.
#pragma once

#include "gpu/cuda/blocked/block_choice.h"

namespace keyhole::gpu {

inline constexpr uint32_t kMeanQueries = 64;  ///< of a group; of a tile there are two

/// Enqueues weights of antidiagonals: weights.stride is 8 or 16, and sample i the group of queries i * stride ... piece: causal, without
/// window and lists.
void launch_antidiagonal_weights(const BlockedParams& piece, const SampledWeights& weights,
                                 DType dtype, uint32_t head_dim, cudaStream_t stream);

/// Memory for means, rows of the dtype: `[q_heads, samples, head_dim]` and `[kv_heads, blocks, head_dim]`, aligned to 16 bytes.
struct Means {
  void* queries = nullptr;
  void* rows = nullptr;
};
/// Enqueues weights of means: weights.stride is kMeanQueries.
void launch_mean_weights(const BlockedParams& piece, const SampledWeights& weights,
                         const Means& means, DType dtype, uint32_t head_dim, cudaStream_t stream);

}  // namespace keyhole::gpu

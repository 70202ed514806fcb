// Which blocks of rows the queries of a stretch of a prompt attend (BlockLists), chosen on the device: always the first ones and
// the newest, and of all others those that hold the weight of some of the queries, whose logits are computed for all rows.
//
// MInference (section 4.2) estimates columns and diagonals from the last 64 queries of a prompt; here every tile of 128 queries
// has estimates of its own, which come in chunks of a prompt as they come in one piece. One query in 16 costs 1/32 of attention.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "gpu/cuda/prefill/blocked_kernels.h"
#include "gpu/cuda/prefill/head_set.h"

namespace keyhole::gpu {

/// Weights of blocks for some queries: the last one, and every `stride`-th before it. All pointers are the device's.
struct SampledWeights {
  uint32_t stride = 0;   ///< 1..kListQueries
  uint32_t samples = 0;  ///< sampled_queries(n, stride)
  uint32_t blocks = 0;   ///< of kListRows rows, all that some query sees
  /// log2 of the sum of 2^logit over a block's rows that the query sees (logits in base 2), -inf where it sees none
  /// `[q_heads, samples, blocks]`.
  float* weights = nullptr;
  HeadSet heads;  ///< whose weights are wanted; those of others are not read, and may be written

  /// The query that sample `i` is, of n; rising.
  [[nodiscard]] __host__ __device__ uint32_t query(uint32_t n, uint32_t i) const {
    return (n - 1) % stride + i * stride;
  }
};
[[nodiscard]] constexpr uint32_t sampled_queries(uint32_t n, uint32_t stride) {
  return (n + stride - 1) / stride;
}

/// Enqueues their computation. piece: causal, without lists; its o, sums and final are not used. dtype: f16 or bf16.
void launch_sample_weights(const BlockedParams& piece, const SampledWeights& samples, DType dtype,
                           uint32_t head_dim, bool hopper, cudaStream_t stream);
/// By the kernels of all devices, and by Hopper's own.
void launch_sample_weights_general(const BlockedParams& piece, const SampledWeights& samples,
                                   DType dtype, uint32_t head_dim, cudaStream_t stream);
void launch_sample_weights_f16(const BlockedParams& piece, const SampledWeights& samples,
                               uint32_t head_dim, cudaStream_t stream);
void launch_sample_weights_bf16(const BlockedParams& piece, const SampledWeights& samples,
                                uint32_t head_dim, cudaStream_t stream);

struct BlockChoice {
  uint32_t first_blocks = 0;  ///< of the prompt, always attended
  uint32_t near_blocks =
      0;  ///< before the block of a tile's first query, always attended with all behind them
  /// Of the weight that the samples of a tile of queries have together, the share that the chosen blocks hold at least.
  float mass = 1.0F;
  /// In place of the mass: so many blocks, beside the first and the near ones, with the largest shares of the weight. 0: the mass.
  uint32_t most_blocks = 0;
  /// Blocks that are attended or not together, 1 or 2, by the sum of their shares: from a multiple of it on. most_blocks counts
  /// these.
  uint32_t unit = 1;
  /// Heads attend all blocks of which the samples have more than this share of their weight, on average over the tiles, each in
  /// blocks where no other sample of its tile has an eighth of it; what is attended anyhow left out. 1: none does.
  float lookups = 1.0F;
  unsigned long long* looked_up = nullptr;  ///< `[q_heads]`, zeros; may be null where lookups is 1
  uint32_t* counts = nullptr;               ///< as BlockLists has them,
  uint16_t* lists = nullptr;                ///< `[q_heads, query tiles, blocks]`
  unsigned long long* totals =
      nullptr;  ///< blocks that are attended, and that are seen, are added to these two; null: not wanted
  HeadSet heads;  ///< whose lists are made; others' stay as they are
  float* skips =
      nullptr;  ///< `[q_heads]`, as BlockedParams has them: the heads' become `skip`; null: not wanted
  float skip = 0.0F;
};
/// Enqueues the choice; samples.weights null: the first and the near ones alone. Weights change.
void launch_choose_blocks(const BlockedParams& piece, const SampledWeights& samples,
                          const BlockChoice& choice, cudaStream_t stream);

}  // namespace keyhole::gpu

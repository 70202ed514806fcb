// The blocks of rows that the queries of a stretch of a prompt attend (BlockLists), chosen on the device: always the
// first and the newest, and of the others those that hold the weight of some of the queries, whose logits are
// computed for all rows.
//
// MInference (section 4.2) estimates columns and diagonals from the last 64 queries of a prompt. Here every tile of
// 128 queries has estimates of its own, so that the choice is the same whether a prompt comes in chunks or in one
// piece. One query in 16 costs 1/32 of attention.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "gpu/cuda/prefill/blocked_kernels.h"
#include "gpu/cuda/prefill/head_set.h"

namespace keyhole::gpu {

/// Weights of blocks for a sample of n queries: the last one, and every `stride`-th before it. All pointers are the
/// device's.
struct SampledWeights {
  uint32_t stride = 0;   ///< 1..kListQueries
  uint32_t samples = 0;  ///< sampled_queries(n, stride)
  uint32_t blocks = 0;   ///< blocks of kListRows rows, all that some query sees
  /// `[q_heads, samples, blocks]` log2 of the sum of 2^logit (logits in base 2) over the rows of a block that the
  /// query sees; -inf where it sees none.
  float* weights = nullptr;
  /// The heads whose weights are wanted; those of others are not read, and may be written.
  HeadSet heads;

  /// The number, among n queries, of the query that is sample `i`; it rises with i.
  [[nodiscard]] __host__ __device__ uint32_t query(uint32_t n, uint32_t i) const {
    return (n - 1) % stride + i * stride;
  }
};
[[nodiscard]] constexpr uint32_t sampled_queries(uint32_t n, uint32_t stride) {
  return (n + stride - 1) / stride;
}

/// Enqueues the computation of the weights. piece: causal, without lists; its o, sums and final are not used. dtype:
/// f16 or bf16.
void launch_sample_weights(const BlockedParams& piece, const SampledWeights& samples, DType dtype,
                           uint32_t head_dim, bool hopper, cudaStream_t stream);
/// The kernels of all devices (general), and Hopper's own (f16, bf16).
void launch_sample_weights_general(const BlockedParams& piece, const SampledWeights& samples,
                                   DType dtype, uint32_t head_dim, cudaStream_t stream);
void launch_sample_weights_f16(const BlockedParams& piece, const SampledWeights& samples,
                               uint32_t head_dim, cudaStream_t stream);
void launch_sample_weights_bf16(const BlockedParams& piece, const SampledWeights& samples,
                                uint32_t head_dim, cudaStream_t stream);

struct BlockChoice {
  uint32_t first_blocks = 0;  ///< first blocks of the prompt, always attended
  uint32_t near_blocks =
      0;  ///< before the block of a tile's first query, always attended with all behind them
  /// The chosen blocks hold at least this share of the weight that all samples of a tile of queries have together.
  float mass = 1.0F;
  /// Number of blocks with the largest shares of the weight that are chosen beside the first and the near ones, in
  /// place of the mass. 0: the mass decides.
  uint32_t most_blocks = 0;
  /// Number of blocks, 1 or 2, that are attended or left out together by the sum of their shares, beginning at a
  /// multiple of it. most_blocks counts such units.
  uint32_t unit = 1;
  /// Lookups: a head attends all blocks if its samples have more than this share of their weight, on average over the
  /// tiles, in blocks where no other sample of the tile has an eighth of the weight that the one has. Blocks that are
  /// attended anyhow do not count. 1: no head does.
  float lookups = 1.0F;
  unsigned long long* looked_up = nullptr;  ///< `[q_heads]`, zeros; may be null where lookups is 1
  uint32_t* counts = nullptr;               ///< as in BlockLists
  uint16_t* lists = nullptr;                ///< `[q_heads, query tiles, blocks]`
  unsigned long long* totals =
      nullptr;  ///< blocks that are attended, and that are seen, are added to these two; null: not wanted
  HeadSet heads;  ///< heads whose lists are made; others' stay as they are
  float* skips =
      nullptr;  ///< `[q_heads]`, as BlockedParams has them: the heads' become `skip`; null: not wanted
  float skip = 0.0F;
};
/// Enqueues the choice. samples.weights null: the first and the near blocks alone. Changes the weights.
void launch_choose_blocks(const BlockedParams& piece, const SampledWeights& samples,
                          const BlockChoice& choice, cudaStream_t stream);

}  // namespace keyhole::gpu

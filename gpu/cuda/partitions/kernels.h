// What the kernels of a CudaPartitions work on, and how they are launched.
//
// Weights. For partition p and query head h of the group, in units of log 2,
//
//   w = n e^(logit of the mean key + e(t, n)),  t = (slope of the logit)^2 |q|^2 variance,
//   |q|^2 of the query's elements times the head's query_scales
//   e(t, n) = t/2 up to t = 2 ln n, and sqrt(2 t ln n) - ln n beyond
//
// t/2 is the second cumulant; beyond 2 ln n the mean of e^x over n Gaussian draws is that of its largest one and
// grows no faster than that (the random energy model: Derrida, Phys. Rev. B 24, 1981). On trained heads with t up to
// 18 the error is that without a bound, and nothing explodes. No further cap is needed: what t makes heavy is
// chosen, so that no partition is left that weighs more than the weakest chosen one.
//
// Merit of a partition: the sum over the group's heads of w / (the head's sum of w). On trained heads it leaves an
// error 10 % below that of w^2 (e^t - 1) / n, the order in which the host opens partitions.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "gpu/partitions_layout.h"
#include "gpu/step.h"

namespace keyhole::gpu {

struct AttentionState;  // gpu/cuda/common/state.cuh

/// A partition whose share is below this part of the mean share of those that were not chosen, for all heads that are
/// attended together (4 of a group at most), gives its mass to the mean value of the others: its own is not read. On
/// trained heads 0.5 spares half of the values and the error stays what it was (0 to 1 were tried).
inline constexpr float kLeastOfMean = 0.5F;

/// What set() and upload() say of one KV head; 16 bytes, read by the kernels in each step.
struct alignas(16) PartitionsHead {
  uint32_t count = 0;
  uint32_t chosen = 0;
  uint32_t tail = 0;  ///< PartitionsTail
  uint32_t unused = 0;
};

/// Where the device says which partitions it has chosen: a line of its own, in pinned memory.
struct alignas(128) PartitionsFlag {
  uint32_t sequence = 0;  ///< of the step whose numbers are there; written last
  uint32_t count = 0;
};

/// One layer. Device memory but for ids and flags; tiles = capacity / kPartitionTile.
struct PartitionsLayer {
  uint32_t kv_heads = 0, group = 0, dim = 0;
  uint32_t padded = 0;       ///< padded_group(group)
  uint32_t capacity = 0;     ///< partitions, a multiple of kPartitionTile
  uint32_t most_chosen = 0;  ///< numbers from one KV head's ids to the next, a multiple of 4
  bool has_shares =
      false;  ///< weights are shares already, and no factors needed: after ..._cluster()
  LogitParams logits;
  DType dtype = DType::f16;  ///< of values

  const PartitionsHead* heads = nullptr;  ///< `[kv_heads]`
  const int8_t* codes = nullptr;          ///< `[kv_heads, capacity, dim]`
  const float* sizes = nullptr;           ///< `[kv_heads, capacity]`
  const float* variances = nullptr;       ///< `[kv_heads, capacity]`
  const float* scales = nullptr;          ///< `[kv_heads, dim]`
  const float* centers = nullptr;         ///< `[kv_heads, dim]`
  const float* query_scales = nullptr;    ///< `[kv_heads, dim]`
  const std::byte* values = nullptr;      ///< `[kv_heads, capacity, dim]`

  // Scratch of a step, of one layer after the other.
  float* weights = nullptr;  ///< `[kv_heads, capacity, padded]` w / 2^(largest log2 w of the tile)
  AttentionState* tile_states =
      nullptr;  ///< `[kv_heads, tiles, padded]` m: that largest log2 w, d: the sum of weights
  float* factors =
      nullptr;  ///< `[kv_heads, tiles, padded]` weight * factor = share of the head's sum
  float* log_sums = nullptr;        ///< `[q_heads]` log2 of the head's sum of w
  float* least_shares = nullptr;    ///< `[q_heads]` shares that are worth reading a value for
  uint32_t* keys = nullptr;         ///< `[kv_heads, capacity]` merits to select by
  uint32_t* chosen_bits = nullptr;  ///< `[kv_heads, capacity / 32]`
  uint32_t* arrivals = nullptr;     ///< `[kv_heads]` zero between steps
  float* partial_o = nullptr;       ///< `[q_heads, kMostSplits, dim]`
  float* partial_sums =
      nullptr;  ///< `[q_heads, kMostSplits, 2]` of shares; of those whose values were read
  uint32_t* tail_arrivals = nullptr;  ///< `[q_heads]` zero between steps
  float* tail_o = nullptr;            ///< `[q_heads, dim]`
  float* tail_lse = nullptr;          ///< `[q_heads]`

  // Pinned memory, at the device's address.
  uint32_t* ids = nullptr;          ///< `[kv_heads, most_chosen]`
  PartitionsFlag* flags = nullptr;  ///< `[kv_heads]`
};

/// Load the kernels of a layer, so that their first launch does not: loading waits for kernels that run, and one of
/// those may wait for the host.
[[nodiscard]] cudaError_t load_choose(const PartitionsLayer& layer);
[[nodiscard]] cudaError_t load_attend(const PartitionsLayer& layer);
/// False where the GPU cannot run it, or the layer has too many partitions for it.
[[nodiscard]] bool load_choose_cluster(const PartitionsLayer& layer, int compute_major);

/// Enqueue them; the launch's error is returned or left for cudaGetLastError().
void launch_choose(const PartitionsLayer& layer, const DeviceRows& q, const uint32_t* sequence,
                   cudaStream_t stream);
[[nodiscard]] cudaError_t launch_choose_cluster(const PartitionsLayer& layer, const DeviceRows& q,
                                                const uint32_t* sequence, cudaStream_t stream);
void launch_attend(const PartitionsLayer& layer, cudaStream_t stream);

}  // namespace keyhole::gpu

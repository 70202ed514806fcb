// The kernels of BlockedAttention (gpu/blocked.h).
#pragma once

#include <cuda_runtime_api.h>
#include <vector_types.h>

#include <cstddef>
#include <cstdint>

#include "cpu/tensor_view.h"
#include "gpu/blocked.h"

namespace keyhole::gpu {

/// The number of queries that share a list, and of rows of one of its blocks.
inline constexpr uint32_t kListQueries = 128, kListRows = 64;
/// The blocks of rows that queries attend, in device memory; each list is rising.
struct BlockLists {
  const uint32_t* counts =
      nullptr;  ///< `[q_heads, query tiles]`, a tile of kListQueries each; null: all of them
  const uint16_t* blocks =
      nullptr;  ///< `[q_heads, query tiles, capacity]`, block b is rows kListRows * b ..
  uint32_t capacity = 0;
};

/// Where the outputs go of queries that attend no further piece.
struct BlockedOutput {
  void* data =
      nullptr;  ///< `[n, q_heads, head_dim]`, rows aligned to 8 bytes; null: states are wanted (BlockedParams::o)
  size_t token_stride = 0, head_stride = 0;  ///< elements
  DType dtype = DType::f32;
  float* lse = nullptr;          ///< `[n, q_heads]`, natural log; null: not wanted
  const float* sinks = nullptr;  ///< learned, `[q_heads]` in natural log; null: none
};

/// One piece of keys and values, for all queries. T: the shape's dtype. All pointers are the device's.
struct BlockedParams {
  // Queries `[n, q_heads, head_dim]` of T in two parts, whose sum they are; the second is null where it is 0.
  const void* q = nullptr;
  const void* q_low = nullptr;
  size_t q_token_stride = 0, q_head_stride = 0;  ///< elements
  uint32_t n = 0;
  uint32_t q_heads = 0;
  uint32_t kv_heads = 0;
  LogitParams logits;

  const void* keys =
      nullptr;  ///< of T: row i of KV head h at h * head_stride + i * row_stride elements
  const void* values = nullptr;
  /// What keys and values have lost by rounding, which lies as they do; null, both: nothing. Of fp16 alone, and beside
  /// q_low.
  const void* keys_low = nullptr;
  const void* values_low = nullptr;
  size_t head_stride = 0, row_stride = 0;
  uint32_t rows = 0;
  bool causal = false;  ///< query i attends rows 0..first + i
  uint32_t first = 0;
  uint32_t window = 0;  ///< of a causal piece, the newest of those rows; 0: all of them
  BlockLists lists;
  const uint64_t* mask = nullptr;  ///< `[n]` of these, those whose bit is set; null: all of them
  /// `[q_heads, query tiles, rows / 32]` a bit for each row that a tile of queries attends, aligned to 8 bytes; null:
  /// all rows. For a piece that is not causal and has whole blocks of kListRows rows.
  const uint32_t* chosen = nullptr;
  /// A block of rows is passed over, without its product with the values, where all its weights are less than 2^-skip
  /// of the largest so far, for each query of a warp (of Hopper's kernel: a warpgroup). 0: no block is.
  float skip = 0.0F;
  /// `[q_heads]` in place of `skip`; null: `skip` holds for all heads.
  const float* skips = nullptr;

  // The state before, which becomes the state after: sums of weights times values `[n, q_heads, head_dim]`, and
  // (largest, sum of weights) `[n, q_heads]`. `largest` is that of the logits, or without a soft-cap of the products,
  // of which logits are `scale` times. Weights are relative to it.
  float* o = nullptr;
  float2* sums = nullptr;
  bool is_first = false;  ///< there is no state before: o and sums are not read
  /// Thread blocks share the rows of a piece without lists and without a state before among so many, each of which
  /// leaves a state of its own: `[parts]` of them, which launch_merge_states() makes one.
  uint32_t parts = 1;
  BlockedOutput final;  ///< outputs of the last piece, in place of the state after
};

void launch_blocked_f16(const BlockedParams& params, uint32_t head_dim, cudaStream_t stream);
void launch_blocked_bf16(const BlockedParams& params, uint32_t head_dim, cudaStream_t stream);
/// launch_blocked_f16() and _bf16() by Hopper's own instructions, without q_low and mask: on devices of compute
/// capability 9.0, where the library has been compiled for them (KEYHOLE_HOPPER); up to kMostHopperDim components.
inline constexpr uint32_t kMostHopperDim = 256;
void launch_hopper_f16(const BlockedParams& params, uint32_t head_dim, cudaStream_t stream);
void launch_hopper_bf16(const BlockedParams& params, uint32_t head_dim, cudaStream_t stream);

/// Enqueues one piece. dtype: f16 or bf16. hopper: by Hopper's kernels, which there are up to kMostHopperDim
/// components.
void launch_blocked(const BlockedParams& params, DType dtype, uint32_t head_dim, bool hopper,
                    cudaStream_t stream);

/// Splits rows `[n, heads, dim]` into two parts without gaps, the second where `low` is not null. bad: set to 1 where
/// an element is not finite; null: not wanted.
void launch_split_rows(const TensorView& from, DType to, void* high, void* low, uint32_t* bad,
                       cudaStream_t stream);
/// Copies `heads` times `bytes` bytes, a multiple of 16, `stride` bytes apart in pinned host memory, to `to` without
/// gaps. A kernel does it, because a copy must not pass from one separately pinned range to the next.
void launch_fetch(const std::byte* from, size_t stride, uint32_t heads, size_t bytes, std::byte* to,
                  cudaStream_t stream);
/// Copies `from`, new rows `[n, heads, dim]`, to `[heads][n, dim]` of dtype `to`, with heads head_stride elements
/// apart.
void launch_gather_rows(const TensorView& from, DType to, void* rows, size_t head_stride,
                        cudaStream_t stream);
/// The same of keys and of values, of one shape.
void launch_gather_rows(const TensorView& k, const TensorView& v, DType to, void* keys,
                        void* values, size_t head_stride, cudaStream_t stream);
/// Multiplies rows in int8 `[heads][rows, dim]` by their scales. which: 0 for keys, 1 for values. `scales` begins
/// with the first row's block and the first of these heads, of `scale_heads` that a block has.
void launch_unpack_rows(const std::byte* from, const uint16_t* scales, uint32_t which,
                        uint32_t scale_heads, uint32_t rows, uint32_t heads, uint32_t dim, DType to,
                        void* out, cudaStream_t stream);
/// Merges `parts` states, each as BlockedParams::o and sums, into the first of them. unit: as for
/// launch_finish_blocked().
void launch_merge_states(float* o, float2* sums, uint32_t parts, uint32_t n, uint32_t heads,
                         uint32_t dim, float unit, cudaStream_t stream);
/// Writes o / sum to out, and lse. unit: the factor that makes a logit of `largest`. sinks: learned, `[heads]` in
/// natural log, or null.
void launch_finish_blocked(const float* o, const float2* sums, uint32_t n, uint32_t heads,
                           uint32_t dim, float unit, const float* sinks, const TensorOut& out,
                           float* lse, cudaStream_t stream);

}  // namespace keyhole::gpu

// Attention of one layer over codes that lie on the device (cpu/code_layout.h): one pass over all codes, then either the
// merge of what its thread blocks have found, or that with the heaviest rows read exactly.
//
// Instantiated for as many bits of keys as of values (1, 2, 4), head dimensions 64, 80, 96 and 128, any group; other shapes
// give cudaErrorInvalidValue. Sessions do not use codes yet.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "cpu/code_layout.h"

namespace keyhole::gpu {

/// Rows of one maximum that attend_codes() leaves.
inline constexpr uint32_t kMaximumRows = 32;

/// One step of one layer. All pointers are to device memory.
struct CodesStep {
  CodeShape shape;
  uint32_t kv_heads = 0;
  uint32_t group = 0;        ///< query heads of a KV head, 1..16
  uint32_t block_count = 0;  ///< of 256 rows, the same for all KV heads
  uint32_t splits = 0;       ///< thread blocks of a KV head, see code_splits()
  float logit_scale = 1.0F;

  const std::byte* blocks = nullptr;   ///< `[kv_heads][block_count][block_bytes]`
  size_t head_stride = 0;              ///< bytes between KV heads
  const float* key_scale = nullptr;    ///< `[kv_heads, dim]` of the balanced space
  const float* value_scale = nullptr;  ///< `[kv_heads]`
  const float* q = nullptr;            ///< `[kv_heads * group, dim]`

  /// Out: the largest logit, in base 2, of every 32 rows: `[kv_heads, block_count * 8, padded group]`, where the
  /// padded group is the next multiple of 4. Null: not wanted.
  float* maxima = nullptr;
  /// finish_codes(): the `exact_rows` (0..kMostExactRows) rows of a KV head with the largest weight in any head of its
  /// group are read from `keys` and `values` and attended exactly, in place of their codes. They may lie in pinned host
  /// memory: rows `[kv_heads][*, dim]` of fp16 or bf16, row i of a head at i * row_stride bytes.
  uint32_t exact_rows = 0;
  const std::byte* keys = nullptr;
  const std::byte* values = nullptr;
  size_t kv_head_stride = 0;   ///< bytes between KV heads
  size_t row_stride = 0;       ///< bytes
  bool bfloat = false;         ///< bf16, else fp16
  uint32_t* chosen = nullptr;  ///< out `[kv_heads, exact_rows]` in no order; null: not wanted

  /// Work space: states of the splits in the rotated space, o `[kv_heads, splits, group, dim]` not divided by its sum,
  /// (maximum, sum) `[kv_heads, splits, group]`, maxima in base 2.
  float* part_o = nullptr;
  float2* part_sum = nullptr;
  float* o = nullptr;    ///< out `[kv_heads * group, dim]`
  float* lse = nullptr;  ///< out `[kv_heads * group]`, natural log
};

/// Thread blocks per KV head that fill `multiprocessors`.
[[nodiscard]] uint32_t code_splits(const CodeShape& shape, uint32_t kv_heads, uint32_t group,
                                   uint32_t block_count, uint32_t multiprocessors);

/// Enqueues the pass over the codes.
[[nodiscard]] cudaError_t attend_codes(const CodesStep& step, cudaStream_t stream);
inline constexpr uint32_t kMostExactRows = 32;

/// Enqueues what follows the pass over the codes: choice of the heaviest rows of this step, their exact attention, the
/// merge. Needs maxima, which attend_codes() has written. `o` and `lse` are the state of all rows.
[[nodiscard]] cudaError_t finish_codes(const CodesStep& step, cudaStream_t stream);
/// Enqueues the merge of its splits alone: exact_rows = 0.
[[nodiscard]] cudaError_t merge_codes(const CodesStep& step, cudaStream_t stream);

}  // namespace keyhole::gpu

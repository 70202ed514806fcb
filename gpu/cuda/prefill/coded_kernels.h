// The kernels of a turn over codes (gpu/cuda/prefill/coded_turn.h): many query rows attend all codes of a layer in one
// pass, and the rows that weigh for one of them exactly.
//
//   prepare   queries balanced and rotated, in fp16; what is known of each before the pass
//   choose    where not all blocks are attended: which, for every tile of query rows (coded_choice.cu)
//   attend    the pass, by Hopper's instructions (coded_attend.cuh) or by those of 8.0 (coded_general.cuh): it leaves
//             out, and lists, what a query is to read exactly
//   number    the rows that some query listed, once each
//   fetch     these rows from pinned host memory
//   merge     parts of the pass, listed rows and the state before, for each query; who is in doubt is listed
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "cpu/types.h"
#include "gpu/coded_rows.h"
#include "gpu/ring.h"

namespace keyhole::gpu {

/// Query rows of a thread block of the pass: its rows are padded to as many.
inline constexpr uint32_t kCodedQueries = 128;
/// Components of a prepared query: those of a row, and zeros.
[[nodiscard]] KEYHOLE_HOST_DEVICE constexpr uint32_t coded_columns(uint32_t dim) {
  return dim <= 64 ? 64 : dim <= 128 ? 128 : 256;
}

/// What the pass knows of a query row. Logits are in base 2.
struct alignas(16) CodedQuery {
  float
      unit;  ///< what makes a product of the prepared query a logit; before a soft-cap a natural one
  float noise;  ///< 0.5 scale^2 |q'|^2 log2(e)
  /// A lower bound of the log-sum-exp. Rows above the log-sum-exp so far plus `limit` are left out and listed; with a
  /// limit of NaN those above `seed`, and with a seed of +inf none.
  float seed, limit;
};

/// What has come of a pass; in device memory, zero at first.
struct CodedStatus {
  static constexpr uint32_t kUnknown = 1;    ///< rows whose codes may be off by anything
  static constexpr uint32_t kTooMany = 2;    ///< more rows than there is room for
  static constexpr uint32_t kNotFinite = 4;  ///< a query, or an answer, was not finite
  uint32_t flags = 0;
  uint32_t most_doubted = 0;  ///< query rows of a KV head, at most, that need another pass
  uint32_t doubted = 0;       ///< of all KV heads together
  uint32_t heads = 0;         ///< KV heads with such rows
  uint32_t rows = 0;          ///< that were fetched
  uint32_t listed = 0;        ///< entries of all lists
};

/// All arrays are the device's. A query row of a KV head is number token * group + head of the group; a pass has the
/// rows that a list names, or all of them.
struct CodedParams {
  CodedRows rows;
  uint32_t n = 0, q_heads = 0, group = 0;
  LogitParams logits;
  // Queries as they came `[n, q_heads, dim]`, in one part or two.
  const void* raw = nullptr;
  const void* raw_low = nullptr;
  DType dtype = DType::f16;
  const float* sinks = nullptr;  ///< learned, `[q_heads]`, natural log; null: none

  // The state before, and the state after: as BlockedParams::o and sums.
  const float* o_before = nullptr;
  const float2* sums_before = nullptr;
  float* o = nullptr;
  float2* sums = nullptr;

  uint32_t padded = 0;  ///< query rows of a KV head in this pass, a multiple of kCodedQueries
  /// `[kv_heads, n * group]` the rows of this pass and how many; their log-sum-exp in base 2, NaN: not known. null:
  /// all.
  const uint32_t* pass_rows = nullptr;
  const float* pass_lse = nullptr;
  const uint32_t* pass_counts = nullptr;  ///< `[kv_heads]`
  // The same of the pass after this.
  uint32_t* next_rows = nullptr;
  float* next_lse = nullptr;
  uint32_t* next_counts = nullptr;

  /// `[kv_heads, padded / kCodedQueries, chosen_blocks]` the blocks that a tile of query rows attends, rising; null:
  /// all.
  const uint32_t* chosen = nullptr;
  uint32_t chosen_blocks = 0;

  __half* q = nullptr;            ///< `[kv_heads, padded, columns]`
  CodedQuery* queries = nullptr;  ///< `[kv_heads, padded]`
  uint32_t splits = 1;
  float* part_o = nullptr;      ///< `[splits, kv_heads, padded, dim]`, rotated and not divided
  float2* part_sums = nullptr;  ///< `[splits, kv_heads, padded]` (largest logit in base 2, sum)
  uint32_t* found =
      nullptr;  ///< `[kv_heads, blocks * 8]` a bit for each row that some query listed
  uint32_t* before = nullptr;       ///< as `found`, the number of bits in the words before
  uint32_t* lists = nullptr;        ///< `[kv_heads, padded, list_capacity]`
  uint32_t* list_counts = nullptr;  ///< `[kv_heads, padded]`, may be above the capacity
  uint32_t list_capacity = 0;
  uint32_t* fetched = nullptr;         ///< `[kv_heads, row_capacity]` the rows that are fetched
  uint32_t* fetched_counts = nullptr;  ///< `[kv_heads]`
  uint32_t row_capacity = 0;
  std::byte* fetched_rows = nullptr;  ///< `[kv_heads, row_capacity, 2 (K, V), row_bytes]`
  CodedStatus* status = nullptr;
  /// Whether kernels are launched ahead of the end of the one before (gpu/cuda/common/launch.h).
  bool launches_ahead = false;
};

void launch_coded_prepare(const CodedParams& params, cudaStream_t stream);
/// Of 2 or 4 bits, head dimensions of 64, 80, 96, 128 and 256. hopper: by the kernels of a device on which
/// hopper_kernels_run_on(); else by those that all devices have.
void launch_coded_attend(const CodedParams& params, bool hopper, cudaStream_t stream);
void launch_coded_attend_2(const CodedParams& params, cudaStream_t stream);
void launch_coded_attend_4(const CodedParams& params, cudaStream_t stream);
void launch_coded_general_2(const CodedParams& params, cudaStream_t stream);
void launch_coded_general_4(const CodedParams& params, cudaStream_t stream);
/// Writes the blocks that each tile attends to `chosen`, which `params` names: behind launch_coded_prepare(). They are
/// fewer than there are, and more than kNewestBlocks, so many of which are the newest.
void launch_coded_choice(const CodedParams& params, uint32_t* chosen, cudaStream_t stream);
inline constexpr uint32_t kNewestBlocks = 2;
/// Whether there is a choice among so many blocks, for as many query heads of a KV head.
[[nodiscard]] bool can_choose_coded(uint32_t blocks, uint32_t group);
/// And a pass over chosen blocks for a head dimension.
[[nodiscard]] constexpr bool has_coded_choice(uint32_t dim) {
  return dim == 64 || dim == 128 || dim == 256;
}
/// Numbers and fetches the rows that were found.
void launch_coded_fetch(const CodedParams& params, cudaStream_t stream);
void launch_coded_merge(const CodedParams& params, cudaStream_t stream);

}  // namespace keyhole::gpu

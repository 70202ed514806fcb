// Attention of a stretch of a prompt whose K and V lie in device memory, before any of it is offloaded: exact, or over
// the blocks of 64 rows that each tile of 128 queries chooses (MInference and what came after;
// gpu/cuda/prefill/block_choice.h, group_weights.h and line_choice.h say how). Query heads may attend by patterns of
// their own. The host has the same of its own memory: runtime/prefill/host_prompt.h.
//
// FLOOR. 4 head_dim operations for each query head and row that it sees: 142 ms for one layer of an 8B shape and 128k
// tokens at the 990 TFLOP/s of Hopper's data sheet.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "cpu/types.h"
#include "gpu/step.h"

namespace keyhole::gpu {

struct PromptShape {
  uint32_t q_heads = 0;
  uint32_t kv_heads = 0;
  uint32_t head_dim = 0;
};

/// How the blocks are found that are attended beside the first and the near ones.
enum class PromptChoice : uint8_t {
  sampled,  ///< by the weights of some queries of each tile; none where stride is 0 (a-shape)
  pooled,   ///< by products of means of 64 queries and of 64 rows (MInference's block-sparse heads)
  /// Not blocks: the rows, and the distances, that the last queries of a stretch attend most (MInference).
  vertical_slash,
};

/// What queries attend of the rows that they see.
struct PromptPattern {
  bool dense = true;        ///< everything; else:
  uint32_t first_rows = 0;  ///< the first rows of the prompt, in whole blocks of 64,
  uint32_t near_rows = 0;   ///< the newest ones, at least so many before each query, likewise,
  PromptChoice choice = PromptChoice::sampled;  ///< and of all others those that this finds:
  /// sampled: blocks that hold the weight of one query in `stride`, 0 (no others) or 1..128,
  uint32_t stride = 0;
  float mass = 1.0F;  ///< until this share of the weight is held, 0..1.
  /// 64, or 128: two blocks, of which the first has an even number, are chosen together, by the sum of their shares of
  /// the weight; the first and the newest rows are in whole pairs of blocks then. Not of vertical_slash.
  uint32_t block_rows = 64;
  /// pooled: so many blocks of each tile, the heaviest, in place of the mass; 0: the mass.
  uint32_t blocks = 0;
  /// vertical_slash: so many rows and distances of each head, 0..16384 each, by the weights of the last `queries`,
  /// 1..64, of a call.
  uint32_t columns = 0, slashes = 0, queries = 64;
  /// Query heads that look up single rows, each query its own, lose what no sampled query looks at. Of such heads more
  /// than this share of the sampled weight, 0..1, lies in blocks that no other sample of the tile cares for: they are
  /// dense for the length of a call. 1: none is.
  float lookups = 1.0F;     ///< of choice sampled
  uint32_t dense_rows = 0;  ///< Stretches that see no more rows than this are dense, and exact.
  /// Of the blocks that are attended, those are passed over (BLASST) that have no weight of 2^-skip of the largest so
  /// far for any of some 64 queries: of n rows, no more than n * 2^-skip of the weight is lost. 0: none are. The host
  /// passes over none.
  float skip = 0.0F;
  /// Of extends of a session whose codes lie on the device, and dense elsewhere: of more than dense_rows rows so many
  /// blocks of 256 (CodedRows::chosen_blocks); 0: all.
  uint32_t coded_blocks = 0;

  bool operator==(const PromptPattern&) const = default;
};

/// All rows aligned to 16 bytes (of out in fp32 to 8).
struct PromptStretch {
  /// `[n, q_heads, head_dim]`, f32, f16 or bf16. Numbers in f32 are sums of two fp16 to a device; where blocks are
  /// chosen, those of K and V are one.
  TensorView q;
  /// Of a device: what q in f16 or bf16 has lost by rounding, which lies as q does and counts in attention, not in the
  /// choice; null: nothing.
  const void* q_low = nullptr;
  TensorView k,
      v;  ///< `[rows, kv_heads, head_dim]`, dtype of q; the queries are the last n of these
  /// Of a device, in f16 and beside q_low: what k and v have lost, likewise, in dense attention; null, both: nothing.
  const void *k_low = nullptr, *v_low = nullptr;
  TensorOut out;         ///< `[n, q_heads, head_dim]`, f16, bf16 or f32
  float* lse = nullptr;  ///< `[n, q_heads]`, natural log, device memory; null: not wanted
  uint32_t n = 0, rows = 0;
  LogitParams logits;
  const float* sinks = nullptr;  ///< learned, `[q_heads]` in host memory, natural log; null: none
  uint32_t window = 0;           ///< of a sliding layer, whose attention is exact; 0: none
};

/// Blocks of 64 rows, summed over tiles of 128 queries and query heads. Gathered rows of vertical_slash count by the
/// blocks of 64 of them that a tile attends.
struct PromptBlocks {
  uint64_t attended = 0, seen = 0;
};

/// Of weights, lists and states of tiles of 128 queries that are attended together, on a device and on the host, so
/// that both slice alike: no more bytes than this, but so many tiles (whole ones of 128 samples of one query in 16) at
/// least. Weights of columns and diagonals are those of as many heads as fit, or of one.
struct SliceLimits {
  size_t bytes = size_t{128} << 20U;
  uint32_t least_tiles = 16;

  /// Of `all` tiles, of so many bytes each.
  [[nodiscard]] uint32_t tiles(size_t of_tile, uint32_t all) const {
    return static_cast<uint32_t>(
        std::min<size_t>(std::max<size_t>(bytes / of_tile, least_tiles), all));
  }
  [[nodiscard]] uint32_t heads(size_t of_head, uint32_t all) const {
    return static_cast<uint32_t>(std::clamp<size_t>(bytes / of_head, 1, all));
  }
};

/// One at a time; calls enqueue, in order, on the current device's streams. All throw Error: invalid_argument,
/// out_of_device_memory, device_error.
class PromptAttention {
 public:
  virtual ~PromptAttention() = default;

  /// patterns: one, or one for each query head (of no more than 512). Not captured in a graph where one is not dense,
  /// numbers are f32, or there are sinks.
  virtual void attend(const PromptStretch& stretch, std::span<const PromptPattern> patterns,
                      Stream stream) = 0;
  /// By one pattern.
  void attend(const PromptStretch& stretch, const PromptPattern& pattern, Stream stream) {
    attend(stretch, std::span(&pattern, 1), stream);
  }
  /// Of all stretches so far that were not dense; waits for them.
  [[nodiscard]] virtual PromptBlocks blocks() const = 0;
  /// Device memory that it holds: grows with the rows, of 32 query heads to some 160 MiB up to 512k and 300 MiB at
  /// 1M, where the pattern chooses blocks; gathered rows of vertical_slash take 4 head_dim bytes for each of a head's
  /// columns beside that. Stretches in f32 take a copy of q, K and V.
  [[nodiscard]] virtual size_t bytes() const = 0;
};

/// Why no device has kernels for the shape; empty: they do.
[[nodiscard]] std::string why_no_prompt(const PromptShape& shape);
/// Whether patterns choose among the rows of such heads: there are no kernels that weigh longer rows, and all are
/// attended.
[[nodiscard]] constexpr bool patterns_choose(uint32_t head_dim) {
  return is_device_index_dim(head_dim);
}

}  // namespace keyhole::gpu

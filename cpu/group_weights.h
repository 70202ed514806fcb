// The weight of blocks of rows for groups of neighbouring queries of a prompt, where cpu/block_weights.h has it for
// single queries. A device computes the same figures: gpu/cuda/prefill/group_weights.h.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cpu/block_attention.h"

namespace keyhole::cpu {

/// Number of neighbouring queries whose mean is multiplied with the means of blocks.
inline constexpr uint32_t kMeanQueries = 64;

/// Computes weights of groups of queries. Keeps its memory between calls: the means, and for each thread 16 KiB plus
/// 256 bytes for each component of a head. One call at a time.
class GroupWeights {
 public:
  GroupWeights(const Kernels& kernels, Pool& pool) : kernels_(&kernels), pool_(&pool) {}

  /// Writes weights `[heads, groups, blocks()]`: the logit of the mean of group i, the queries from i * kMeanQueries
  /// on, with the mean of the rows that a block has; -inf where a block begins behind the group's last query. The
  /// piece has no window; its values are not read. heads: query heads, rising. Throws std::bad_alloc.
  void means(const PromptPiece& piece, std::span<const uint32_t> heads, float* weights);

 private:
  struct Scratch {
    explicit Scratch(const Kernels& kernels) : unpacker(kernels) {}
    RowUnpacker unpacker;
    LineVector<float> keys, x;
  };
  /// Weighs kPromptRows blocks by their means for the heads from heads[first_head] on that share their keys.
  void weigh_tile(const PromptPiece& piece, std::span<const uint32_t> heads, size_t first_head,
                  uint32_t tile, float* weights, Scratch& scratch);
  void average(const RowRuns& rows, size_t head, uint32_t first, uint32_t count, uint32_t dim,
               float* out) const;

  const Kernels* kernels_;
  Pool* pool_;
  LineVector<float> query_means_;  ///< `[heads, groups, head_dim]`
  LineVector<float> row_means_;    ///< `[blocks, kv_heads, head_dim]`
  std::vector<Scratch> scratch_;
};

}  // namespace keyhole::cpu

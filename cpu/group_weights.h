// What blocks of rows weigh for groups of neighbouring queries of a prompt, beside what they weigh for single ones
// (cpu/block_weights.h): the same figures as a device's, gpu/cuda/prefill/group_weights.h.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cpu/block_attention.h"

namespace keyhole::cpu {

/// Queries whose mean meets the means of blocks.
inline constexpr uint32_t kMeanQueries = 64;

/// Keeps its memory between calls: the means, and for each thread 16 KiB and 256 bytes for each component of a head; one call at a
/// time.
class GroupWeights {
 public:
  GroupWeights(const Kernels& kernels, Pool& pool) : kernels_(&kernels), pool_(&pool) {}

  /// The logit of the mean of kMeanQueries queries and the mean of a block's rows, of those that there are. Of a piece without
  /// window, whose values are not read. weights `[heads, groups, blocks()]`, written: of group i, the queries from i * kMeanQueries
  /// on, -inf where a block begins behind the group's last query. heads: query heads, rising. Throws std::bad_alloc.
  void means(const PromptPiece& piece, std::span<const uint32_t> heads, float* weights);

 private:
  struct Scratch {
    explicit Scratch(const Kernels& kernels) : unpacker(kernels) {}
    RowUnpacker unpacker;
    LineVector<float> keys, x;
  };
  /// Of kPromptRows blocks and the heads from heads[first_head] on that share their keys, by their means.
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

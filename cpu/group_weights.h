// What blocks of rows weigh for groups of neighbouring queries of a prompt, beside what they weigh for single ones
// (cpu/block_weights.h): the same figures as a device's, gpu/cuda/blocked/group_weights.h.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cpu/block_attention.h"

namespace keyhole::cpu {

/// Queries whose mean meets the means of blocks.
inline constexpr uint32_t kMeanQueries = 64;

/// Keeps its memory between calls, some 8 KiB for each component of a head and thread; one call at a time.
class GroupWeights {
 public:
  GroupWeights(const Kernels& kernels, Pool& pool) : kernels_(&kernels), pool_(&pool) {}

  // Of a piece without window, whose values are not read. weights `[heads, groups, blocks()]`, written: of group i, the queries from
  // i times the group's length on, -inf where a block begins behind the group's last query. heads: query heads, rising. Throw
  // std::bad_alloc.

  /// Groups of `stride` queries, 8 or 16, meet as many rows at a time: a logit is that of the mean of the products along the
  /// square's antidiagonal, what lies behind the piece's end being 0. ln of the sum of e^logit over the squares of a block.
  void antidiagonals(const PromptPiece& piece, uint32_t stride, std::span<const uint32_t> heads,
                     float* weights);
  /// The logit of the mean of kMeanQueries queries and the mean of a block's rows, of those that there are.
  void means(const PromptPiece& piece, std::span<const uint32_t> heads, float* weights);

 private:
  struct Scratch {
    explicit Scratch(const Kernels& kernels) : unpacker(kernels) {}
    RowUnpacker unpacker;
    LineVector<float> queries, keys, x;
  };
  /// Queries and rows whose products are wanted: of a group there are `slices`, one after the other.
  struct Groups {
    TokenRows q;  ///< by the place in `heads`, where q_by_place, else by the head
    RowRuns k;
    uint32_t queries = 0, rows = 0;
    uint32_t slices = 1;
    uint32_t group_queries = 0, group_rows = 0;  ///< of the piece
    bool q_by_place = false;
  };
  void weigh(const PromptPiece& piece, const Groups& groups, std::span<const uint32_t> heads,
             float* weights);
  /// Of kPromptRows groups of rows and the heads from heads[first_head] on that share their keys.
  void weigh_tile(const PromptPiece& piece, const Groups& groups, std::span<const uint32_t> heads,
                  size_t first_head, uint32_t tile, float* weights, Scratch& scratch) const;
  void unpack_queries(const Groups& groups, size_t head, uint32_t first, uint32_t count,
                      uint32_t dim, float* out) const;
  void average(const RowRuns& rows, size_t head, uint32_t first, uint32_t count, uint32_t dim,
               float* out) const;

  const Kernels* kernels_;
  Pool* pool_;
  LineVector<float> query_means_;  ///< `[groups, heads, head_dim]`
  LineVector<float> row_means_;    ///< `[blocks, kv_heads, head_dim]`
  std::vector<Scratch> scratch_;
};

}  // namespace keyhole::cpu

// The softmax weight of columns and diagonals ("vertical" and "slash" lines, MInference) of a prompt's attention for
// its last queries: weights summed over each row, and over each distance between query and row.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cpu/block_weights.h"

namespace keyhole::cpu {

inline constexpr uint32_t kMostLineQueries = 64;

/// Computes line weights. Keeps its memory between calls, some 8 bytes for each row and head; one call at a time.
class LineWeights {
 public:
  LineWeights(const Kernels& kernels, Pool& pool)
      : kernels_(&kernels), pool_(&pool), blocks_(kernels, pool) {}

  /// Writes columns and slashes `[heads, rows]`, for each of `heads` (query heads, rising): the weights of the last
  /// `queries` (1..kMostLineQueries, no more than piece.n) queries summed by row and by distance, 0 where no query
  /// sees the line. The piece has no window; its values are not read. The order of each sum is fixed. Throws
  /// std::bad_alloc.
  void compute(const PromptPiece& piece, uint32_t queries, std::span<const uint32_t> heads,
               float* columns, float* slashes);

 private:
  struct Scratch {
    explicit Scratch(const Kernels& kernels) : unpacker(kernels) {}
    RowUnpacker unpacker;
    LineVector<float> keys, x;
  };
  void find_sums(const PromptPiece& last, std::span<const uint32_t> heads);
  void weigh_block(const PromptPiece& last, std::span<const uint32_t> heads, size_t first_head,
                   uint32_t block, float* columns, float* slashes, Scratch& scratch) const;

  const Kernels* kernels_;
  Pool* pool_;
  BlockWeights blocks_;
  std::vector<float> of_blocks_;  ///< `[heads, queries, blocks]`
  std::vector<float> lse_;        ///< `[heads, queries]`
  LineVector<float> queries_;     ///< `[heads, queries, head_dim]`, times the scale
  std::vector<Scratch> scratch_;
};

}  // namespace keyhole::cpu

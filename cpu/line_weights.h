// What columns and diagonals ("vertical" and "slash" lines, MInference) of a prompt's attention weigh for its last queries: softmax
// weights, added up over each row and over each distance between query and row.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cpu/block_weights.h"

namespace keyhole::cpu {

inline constexpr uint32_t kMostLineQueries = 64;

/// Keeps its memory between calls, of each head some 8 bytes for each row; one call at a time.
class LineWeights {
 public:
  LineWeights(const Kernels& kernels, Pool& pool)
      : kernels_(&kernels), pool_(&pool), blocks_(kernels, pool) {}

  /// Sums over the last `queries` (1..kMostLineQueries, no more than piece.n) of a piece without window, whose values are not read,
  /// for each of `heads` (query heads, rising): columns, slashes `[heads, rows]`, written, by row and by distance, 0 where no query
  /// sees one. No sum is added up in an order that depends on chance. Throws std::bad_alloc.
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

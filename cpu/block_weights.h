// The softmax weight of blocks of rows for some queries of a prompt: the figures by which blocks are chosen.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cpu/block_attention.h"

namespace keyhole::cpu {

/// A sample of n queries: the last one and every `stride`-th before it.
struct SampledQueries {
  uint32_t n = 0, stride = 1;

  [[nodiscard]] uint32_t count() const { return (n + stride - 1) / stride; }
  /// The number of the query that is sample i; it rises with i.
  [[nodiscard]] uint32_t query(uint32_t i) const { return (n - 1) % stride + i * stride; }
  /// The first sample at or behind `query`.
  [[nodiscard]] uint32_t from(uint32_t query) const {
    const uint32_t offset = (n - 1) % stride;
    return query <= offset ? 0 : (query - offset + stride - 1) / stride;
  }
};

/// Computes block weights. Keeps its memory between calls; one call at a time.
class BlockWeights {
 public:
  BlockWeights(const Kernels& kernels, Pool& pool) : kernels_(&kernels), pool_(&pool) {}

  /// Writes weights `[heads, samples, blocks()]`: for each of `heads` (query heads, rising) and each sample, ln of
  /// the sum of e^logit over the rows of a block that the query sees, -inf where it sees none. The piece has no
  /// window; its values are not read.
  void compute(const PromptPiece& piece, const SampledQueries& samples,
               std::span<const uint32_t> heads, float* weights);

 private:
  struct Scratch {
    explicit Scratch(const Kernels& kernels) : unpacker(kernels) {}
    RowUnpacker unpacker;
    LineVector<float> keys, x;
  };
  void weigh_block(const PromptPiece& piece, const SampledQueries& samples,
                   std::span<const uint32_t> heads, size_t first_head, uint32_t block,
                   float* weights, Scratch& scratch) const;

  const Kernels* kernels_;
  Pool* pool_;
  LineVector<float> queries_;  ///< `[heads, samples, head_dim]`
  std::vector<Scratch> scratch_;
};

}  // namespace keyhole::cpu

// pages: the best pages of consecutive keys by an upper bound of their scores, attended exactly, as in Quest.
//
// Tang et al., "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference", ICML 2024 (arXiv 2406.10774).
// For each page of `size` consecutive tokens the least and the largest value of every channel of its keys are kept.
// No key of the page can score above the sum over channels of max(q * least, q * largest); each head takes the pages
// of the largest such bounds until its budget is full. As everywhere in compare, all heads of a group attend the
// union of what they take.
#pragma once

#include "tools/rivals/rival.h"

namespace keyhole::tools {

/// The bounds alone. Least and largest values are stored in the type of the keys, so that nothing is rounded.
class PageBounds {
 public:
  PageBounds() = default;
  /// keys `[rows, d]`; the last page may be shorter.
  PageBounds(ElementType type, const float* keys, size_t rows, size_t dim, size_t page_size);

  [[nodiscard]] size_t dim() const { return dim_; }
  [[nodiscard]] size_t pages() const { return least_.rows(); }
  [[nodiscard]] uint64_t bytes() const { return least_.bytes() + largest_.bytes(); }
  /// Writes out[p], which is at least q . k for every key k of page p, up to rounding in fp32; query `[d]`, out
  /// `[pages]`.
  void of(const float* query, float* out);

 private:
  StoredMatrix least_, largest_;
  size_t dim_ = 0;
  std::vector<float> positive_, negative_, products_;
};

}  // namespace keyhole::tools

// Which candidates a key is linked to: the occlusion rule of relative neighbourhood graphs, in the lifted
// geometry.
#pragma once

#include <vector>

#include "index/graph/lifted_keys.h"
#include "index/scan/topk.h"

namespace keyhole::index {

/// Which of two equally distant candidates is preferred. Rows inserted one after the other prefer the newest:
/// the first of many equal keys would otherwise take all their links, and most of them could not be reached.
enum class Ties { smaller_row, larger_row };

/// The working memory with which one thread chooses links.
class EdgePruner {
 public:
  explicit EdgePruner(const LiftedKeys& keys, Ties ties = Ties::smaller_row)
      : keys_(&keys), flip_(ties == Ties::smaller_row ? 0 : 0xFFFFFFFF) {}

  /// Chooses at most `most` of the candidates for `row`: nearest first, leaving out every candidate that is
  /// nearer to a chosen one than to the row. fill: if that leaves fewer, the nearest left out are taken in after all.
  /// Duplicates and the row itself are dropped. The first `kept` candidates are chosen beforehand and occlude
  /// others. The result is valid until the next call.
  [[nodiscard]] std::span<const uint32_t> prune(uint32_t row, std::span<const uint32_t> candidates,
                                                size_t kept, size_t most, bool fill);

 private:
  void hide_behind(uint32_t chosen, size_t from);

  const LiftedKeys* keys_;
  uint32_t flip_;  // the order of row ^ flip_ decides the order of ties
  std::vector<uint32_t> ids_;
  std::vector<float> scores_;  // similarity to the row
  std::vector<uint64_t> order_;
  std::vector<float> to_chosen_;
  std::vector<uint8_t> hidden_;
  std::vector<uint32_t> seen_, seen_ids_;  // candidates that are not hidden: places, rows
  std::vector<uint32_t> chosen_;
  LiftedKeys::Query query_;
};

}  // namespace keyhole::index

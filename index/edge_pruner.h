// Which candidates a key is linked to: the occlusion rule of relative neighbourhood graphs, in the lifted
// geometry.
#pragma once

#include <vector>

#include "index/lifted_keys.h"
#include "index/topk.h"

namespace keyhole::index {

/// Working memory of one thread.
class EdgePruner {
 public:
  explicit EdgePruner(const LiftedKeys& keys) : keys_(&keys) {}

  /// Chooses at most `most` of the candidates for `row`: nearest first, leaving out whoever is nearer to one
  /// already chosen than to the row. fill: if that leaves fewer, the nearest left out are taken in after all.
  /// Duplicates and the row itself are dropped. The first `kept` candidates are chosen beforehand and hide
  /// others. Equal distances: the smaller row. The result is valid until the next call.
  [[nodiscard]] std::span<const uint32_t> prune(uint32_t row, std::span<const uint32_t> candidates,
                                                size_t kept, size_t most, bool fill);

 private:
  void hide_behind(uint32_t chosen, size_t from);

  const LiftedKeys* keys_;
  std::vector<uint32_t> ids_;
  std::vector<float> scores_;  // similarity to the row
  std::vector<uint64_t> order_;
  std::vector<float> to_chosen_;
  std::vector<uint8_t> hidden_;
  std::vector<uint32_t> seen_, seen_ids_;  // who is not hidden: places, rows
  std::vector<uint32_t> chosen_;
  float query_[kMaxHeadDim] = {};
};

}  // namespace keyhole::index

// The hits of the parts of one KV head's search, kept until the last part merges them into the best k.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "index/index.h"

namespace keyhole::runtime {

class PartHits {
 public:
  void reserve(uint32_t parts, uint32_t group, uint32_t k);

  /// Copies the hits of part `part`, `[group, k]`. Different parts may be kept at once.
  void keep(uint32_t part, const index::Hits& found, uint32_t group, uint32_t k);
  [[nodiscard]] std::span<const index::Hits> first(uint32_t parts) const {
    return {hits_.data(), parts};
  }
  [[nodiscard]] size_t bytes() const {
    return ids_.size() * sizeof(uint32_t) + scores_.size() * sizeof(float);
  }

 private:
  std::vector<uint32_t> ids_, counts_;  // `[parts, group, k]`, `[parts, group]`
  std::vector<float> scores_;
  std::vector<index::Hits> hits_;  // views of them
};

/// Writes the best k of each head over all parts. The result does not depend on the order of the parts.
void merge_hits(std::span<const index::Hits> parts, uint32_t group, uint32_t k, index::Hits& out);

}  // namespace keyhole::runtime

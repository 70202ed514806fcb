#include "runtime/step/part_hits.h"

#include <algorithm>

#include "index/scan/topk.h"
#include "runtime/step/query.h"

namespace keyhole::runtime {

void PartHits::reserve(uint32_t parts, uint32_t group, uint32_t k) {
  const size_t stride = size_t{group} * k;
  ids_.resize(parts * stride);
  scores_.resize(parts * stride);
  counts_.resize(size_t{parts} * group);
  hits_.clear();
  hits_.reserve(parts);
  for (size_t i = 0; i < parts; ++i) {
    hits_.push_back(
        {ids_.data() + i * stride, scores_.data() + i * stride, counts_.data() + i * group, 0, 0});
  }
}

void PartHits::keep(uint32_t part, const index::Hits& found, uint32_t group, uint32_t k) {
  const index::Hits& kept = hits_[part];
  std::copy_n(found.counts, group, kept.counts);
  for (uint32_t h = 0; h < group; ++h) {
    const size_t at = size_t{h} * k;
    std::copy_n(found.ids + at, found.counts[h], kept.ids + at);
    std::copy_n(found.scores + at, found.counts[h], kept.scores + at);
  }
}

void merge_hits(std::span<const index::Hits> parts, uint32_t group, uint32_t k, index::Hits& out) {
  for (uint32_t h = 0; h < group; ++h) {
    uint32_t* ids = out.ids + size_t{h} * k;
    float* scores = out.scores + size_t{h} * k;
    uint32_t taken[kMaxParts] = {};
    uint32_t count = 0;
    while (count < k) {
      uint64_t best = 0;
      size_t from = 0;
      for (size_t p = 0; p < parts.size(); ++p) {
        if (taken[p] == parts[p].counts[h]) continue;
        const size_t at = size_t{h} * k + taken[p];
        const uint64_t rank = index::pack_rank(parts[p].scores[at], parts[p].ids[at]);
        if (rank <= best) continue;
        best = rank;
        from = p;
      }
      if (best == 0) break;
      ++taken[from];
      const uint32_t id = index::rank_row(best);
      // Parts that share heads may both have found it: with the same score, so next to each other.
      if (count > 0 && ids[count - 1] == id) continue;
      ids[count] = id;
      scores[count++] = index::rank_score(best);
    }
    out.counts[h] = count;
  }
}

}  // namespace keyhole::runtime

// Best-first search of a graph with a beam of `ef` (HNSW's level search), over any adjacency and any
// scoring. Nodes are expanded in two passes: first the unvisited neighbours are gathered, then all of
// them are scored in one kernel call, which prefetches whole keys well ahead.
#pragma once

#include <algorithm>
#include <cstring>
#include <functional>
#include <span>
#include <vector>

#include "index/topk.h"

namespace keyhole::index {

/// Working memory of beam searches; grows to the largest graph and beam seen.
class Beam {
 public:
  /// Makes room for graphs of `nodes` rows, lists of `degree` links and beams of `ef`.
  void reserve(size_t nodes, size_t degree, size_t ef) {
    if (tags_.size() < nodes) {
      tags_.assign(nodes + nodes / 4, 0);  // appends grow a graph in steps
      tag_ = 0;
    }
    if (ids_.size() < degree) {
      ids_.resize(degree);
      scores_.resize(degree);
    }
    results_.reserve(ef + 1);
    // A candidate is pushed when it enters the results; each row enters at most once.
    candidates_.reserve(nodes + nodes / 4);
  }

  /// Searches from `starts`. neighbours(row) gives a span of rows; score(ids, n, out) their scores. The
  /// results (at most ef, in no order) are valid until the next call.
  template <class Neighbours, class Score>
  std::span<const uint64_t> search(std::span<const uint32_t> starts, size_t ef,
                                   const Neighbours& neighbours, const Score& score) {
    next_tag();
    results_.clear();
    candidates_.clear();
    scored_ = 0;
    expanded_ = 0;
    visit(starts, ef, score);
    while (!candidates_.empty()) {
      const uint64_t best = candidates_.front();
      if (results_.size() >= ef && best < results_.front()) break;
      std::pop_heap(candidates_.begin(), candidates_.end());
      candidates_.pop_back();
      ++expanded_;
      visit(neighbours(rank_row(best)), ef, score);
      if (!candidates_.empty()) {
        __builtin_prefetch(neighbours.address(rank_row(candidates_.front())));
      }
    }
    return results_;
  }

  [[nodiscard]] size_t scored() const { return scored_; }      ///< rows scored by the last search
  [[nodiscard]] size_t expanded() const { return expanded_; }  ///< lists read by the last search

 private:
  // 16-bit tags: a reset touches memory once in 65,535 searches.
  void next_tag() {
    if (++tag_ == 0) {
      std::fill(tags_.begin(), tags_.end(), uint16_t{0});
      tag_ = 1;
    }
  }

  template <class Score>
  void visit(std::span<const uint32_t> rows, size_t ef, const Score& score) {
    size_t n = 0;
    for (const uint32_t row : rows) {
      ids_[n] = row;
      n += static_cast<size_t>(tags_[row] != tag_);
      tags_[row] = tag_;
    }
    if (n == 0) return;
    score(ids_.data(), n, scores_.data());
    scored_ += n;
    for (size_t i = 0; i < n; ++i) {
      const uint64_t rank = pack_rank(scores_[i], ids_[i]);
      if (results_.size() < ef) {
        results_.push_back(rank);
        std::push_heap(results_.begin(), results_.end(), std::greater<>());
      } else if (rank > results_.front()) {
        std::pop_heap(results_.begin(), results_.end(), std::greater<>());
        results_.back() = rank;
        std::push_heap(results_.begin(), results_.end(), std::greater<>());
      } else {
        continue;
      }
      candidates_.push_back(rank);
      std::push_heap(candidates_.begin(), candidates_.end());
    }
  }

  std::vector<uint16_t> tags_;
  uint16_t tag_ = 0;
  std::vector<uint32_t> ids_;
  std::vector<float> scores_;
  std::vector<uint64_t> results_;     // min-heap: the worst in front
  std::vector<uint64_t> candidates_;  // max-heap: the best in front
  size_t scored_ = 0;
  size_t expanded_ = 0;
};

}  // namespace keyhole::index

// Best-first search of a graph with a beam of `ef` (HNSW's level search), over any adjacency and any
// scoring.
//
// An expansion finds few rows that are new (3 of 14 on a typical graph), so a search waits for memory: for a
// list of links, then for the keys. Both waits are covered. Lists are prefetched when their row enters the
// beam; and an expansion has two halves, gather() and absorb(), so that a caller with several searches
// can let the keys of one arrive while it works on the others.
#pragma once

#include <span>
#include <utility>
#include <vector>

#include "index/graph/row_marks.h"
#include "index/graph/sorted_beam.h"
#include "index/grow.h"

namespace keyhole::index {

/// One search at a time, with its memory, which grows to the largest graph and beam seen.
class Beam {
 public:
  /// Reserves memory for graphs of `nodes` rows, lists of `degree` links and beams of `ef`.
  void reserve(size_t nodes, size_t degree, size_t ef) {
    nodes_ = nodes;
    visited_.reserve(nodes);
    grow(pending_, degree);
    grow(scores_, degree);
    beam_.reserve(ef);
  }

  /// Begins a search from `starts` and `more` (together at most `degree`), all of which become pending.
  void start(std::span<const uint32_t> starts, size_t ef, std::span<const uint32_t> more = {}) {
    visited_.begin(nodes_);
    beam_.start(ef);
    scored_ = 0;
    expanded_ = 0;
    pending_size_ = 0;
    add_unvisited(starts);
    add_unvisited(more);
  }

  /// Expands the best row that has not been expanded: its unvisited neighbours become pending. neighbours(row) gives
  /// a span of rows. Returns false when the search is over.
  template <class Neighbours>
  [[nodiscard]] bool gather(const Neighbours& neighbours) {
    uint32_t row = 0;
    if (!beam_.next(row)) return false;
    ++expanded_;
    gather_unvisited(neighbours(row));
    return true;
  }

  /// The rows that absorb() will score.
  [[nodiscard]] std::span<const uint32_t> pending() const {
    return {pending_.data(), pending_size_};
  }

  /// Scores the pending rows, score(ids, n, out), and keeps those that are good enough.
  template <class Neighbours, class Score>
  void absorb(const Neighbours& neighbours, const Score& score) {
    const size_t n = std::exchange(pending_size_, 0);
    if (n == 0) return;
    score(pending_.data(), n, scores_.data());
    scored_ += n;
    for (size_t i = 0; i < n; ++i) {
      if (beam_.offer(scores_[i], pending_[i])) neighbours.prefetch(pending_[i]);
    }
  }

  /// Runs a whole search.
  template <class Neighbours, class Score>
  void search(std::span<const uint32_t> starts, size_t ef, const Neighbours& neighbours,
              const Score& score) {
    start(starts, ef);
    do {
      absorb(neighbours, score);
    } while (gather(neighbours));
  }

  [[nodiscard]] size_t size() const { return beam_.size(); }  ///< rows found, at most ef
  /// The i-th best row found and its score, as a rank. Valid until the next start().
  [[nodiscard]] uint64_t rank(size_t i) const { return beam_.rank(i); }
  [[nodiscard]] size_t scored() const { return scored_; }      ///< rows scored by this search
  [[nodiscard]] size_t expanded() const { return expanded_; }  ///< lists read by this search

 private:
  void gather_unvisited(std::span<const uint32_t> rows) {
    pending_size_ = 0;
    add_unvisited(rows);
  }
  void add_unvisited(std::span<const uint32_t> rows) {
    for (const uint32_t row : rows) {
      pending_[pending_size_] = row;
      pending_size_ += static_cast<size_t>(visited_.insert(row));
    }
  }

  RowMarks visited_;
  size_t nodes_ = 0;
  std::vector<uint32_t> pending_;
  size_t pending_size_ = 0;
  std::vector<float> scores_;
  SortedBeam beam_;
  size_t scored_ = 0;
  size_t expanded_ = 0;
};

/// Asks for the bytes [begin, begin + bytes), into the second-level cache: a core can wait for 48 lines there,
/// for 16 in the first level (see cpu/simd/rows.h).
inline void prefetch(const void* begin, size_t bytes) {
  const auto* p = static_cast<const char*>(begin);
  for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i, 0, 2);
}

}  // namespace keyhole::index

// Best-first search of a graph with a beam of `ef` (HNSW's level search), over any adjacency and any
// scoring.
//
// The beam is one array sorted by rank, with a mark on the rows that have been expanded and a cursor at the
// first that has not: for beams of hundreds this takes a third of the time of the usual two heaps, whose
// sifting mispredicts at every level.
//
// An expansion finds few rows that are new (3 of 14 on a typical graph), so a search waits for memory: for a
// list of links, then for the keys. Both waits are covered. Lists are prefetched when their row enters the
// beam; and an expansion has two halves, gather() and absorb(), so that a caller with several searches
// can let the keys of one arrive while it works on the others.
#pragma once

#include <algorithm>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include "index/topk.h"

namespace keyhole::index {

/// Rows that a beam can tell apart: one bit of a row number is the mark.
inline constexpr size_t kMaxBeamRows = size_t{1} << 31;

/// One search at a time, and its memory, which grows to the largest graph and beam seen.
class Beam {
 public:
  /// Makes room for graphs of `nodes` rows, lists of `degree` links and beams of `ef`.
  void reserve(size_t nodes, size_t degree, size_t ef) {
    if (tags_.size() < nodes) {
      tags_.assign(nodes + nodes / 4, 0);  // appends grow a graph in steps
      tag_ = 0;
    }
    if (pending_.size() < degree) {
      pending_.resize(degree);
      scores_.resize(degree);
    }
    if (beam_.size() < ef + 1) beam_.resize(ef + 1);
  }

  /// Begins a search from `starts` (at most `degree`), all of which become pending.
  void start(std::span<const uint32_t> starts, size_t ef) {
    // 16-bit tags: a reset touches memory once in 65,535 searches.
    if (++tag_ == 0) {
      std::fill(tags_.begin(), tags_.end(), uint16_t{0});
      tag_ = 1;
    }
    ef_ = ef;
    size_ = 0;
    cursor_ = 0;
    scored_ = 0;
    expanded_ = 0;
    gather_unvisited(starts);
  }

  /// Expands the best row that is not yet: its unvisited neighbours become pending. neighbours(row) gives
  /// a span of rows. False: the search is over.
  template <class Neighbours>
  [[nodiscard]] bool gather(const Neighbours& neighbours) {
    while (cursor_ < size_ && (beam_[cursor_] & kExpanded) != 0) ++cursor_;
    if (cursor_ == size_) return false;
    const uint32_t row = row_of(beam_[cursor_]);
    beam_[cursor_] |= kExpanded;
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
      const uint64_t entry = entry_of(scores_[i], pending_[i]);
      if (size_ == ef_ && entry < beam_[size_ - 1]) continue;
      insert(entry);
      neighbours.prefetch(pending_[i]);
    }
  }

  /// A whole search.
  template <class Neighbours, class Score>
  void search(std::span<const uint32_t> starts, size_t ef, const Neighbours& neighbours,
              const Score& score) {
    start(starts, ef);
    do {
      absorb(neighbours, score);
    } while (gather(neighbours));
  }

  [[nodiscard]] size_t size() const { return size_; }  ///< rows found, at most ef
  /// The i-th best row found and its score, as a rank. Valid until the next start().
  [[nodiscard]] uint64_t rank(size_t i) const {
    return (beam_[i] & 0xFFFFFFFF00000000U) | (~row_of(beam_[i]) & 0xFFFFFFFFU);
  }
  [[nodiscard]] size_t scored() const { return scored_; }      ///< rows scored by this search
  [[nodiscard]] size_t expanded() const { return expanded_; }  ///< lists read by this search

 private:
  static constexpr uint64_t kExpanded = 1;

  // A rank whose row, of 31 bits, moved up by one to make room for the mark; the order is the same.
  static uint64_t entry_of(float score, uint32_t row) {
    return (pack_rank(score, 0) & 0xFFFFFFFF00000000U) | static_cast<uint32_t>(~row << 1);
  }
  static uint32_t row_of(uint64_t entry) { return ~static_cast<uint32_t>(entry) >> 1; }

  void gather_unvisited(std::span<const uint32_t> rows) {
    pending_size_ = 0;
    for (const uint32_t row : rows) {
      pending_[pending_size_] = row;
      pending_size_ += static_cast<size_t>(tags_[row] != tag_);
      tags_[row] = tag_;
    }
  }

  void insert(uint64_t entry) {
    // Binary search without a branch on the data.
    const uint64_t* at = beam_.data();
    for (size_t n = size_; n > 0;) {
      const size_t half = (n + 1) / 2;
      at += at[half - 1] > entry ? half : 0;
      n -= half;
    }
    const auto place = static_cast<size_t>(at - beam_.data());
    std::memmove(beam_.data() + place + 1, beam_.data() + place, (size_ - place) * sizeof entry);
    beam_[place] = entry;
    size_ = std::min(size_ + 1, ef_);
    cursor_ = std::min(cursor_, place);
  }

  std::vector<uint16_t> tags_;  // == tag_: visited
  uint16_t tag_ = 0;
  std::vector<uint32_t> pending_;
  size_t pending_size_ = 0;
  std::vector<float> scores_;
  std::vector<uint64_t> beam_;  // falling; one more than ef, for the entry that drops out
  size_t ef_ = 0;
  size_t size_ = 0;
  size_t cursor_ = 0;  // all before it are expanded
  size_t scored_ = 0;
  size_t expanded_ = 0;
};

/// The bytes [begin, begin + bytes) into the cache.
inline void prefetch(const void* begin, size_t bytes) {
  const auto* p = static_cast<const char*>(begin);
  for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i);
}

}  // namespace keyhole::index

// The candidates of a best-first search: one array sorted by rank, with a mark on the rows that have been
// expanded and a cursor at the first that has not. For beams of hundreds this takes a third of the time of
// the usual two heaps, whose sifting mispredicts at every level.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "index/base.h"
#include "index/scan/topk.h"

namespace keyhole::index {

// One bit of a row number is the mark of a row that has been expanded.
static_assert(kMaxRows <= size_t{1} << 31, "a beam tells 2^31 rows apart");

class SortedBeam {
 public:
  /// Reserves memory for beams of `ef`; allocates only where that is more than before.
  void reserve(size_t ef) {
    if (entries_.size() < ef + 1) entries_.resize(ef + 1);
  }
  /// Empties the beam and makes it `ef` wide.
  void start(size_t ef) {
    ef_ = ef;
    size_ = 0;
    cursor_ = 0;
  }

  /// Marks the best row that has not been expanded as expanded and puts it into `row`. False: there is none.
  [[nodiscard]] bool next(uint32_t& row) {
    while (cursor_ < size_ && (entries_[cursor_] & kExpanded) != 0) ++cursor_;
    if (cursor_ == size_) return false;
    row = row_of(entries_[cursor_]);
    entries_[cursor_] |= kExpanded;
    return true;
  }

  /// Takes the row in if it is among the best `ef` so far; a row must come only once.
  bool offer(float score, uint32_t row) {
    const uint64_t entry = entry_of(score, row);
    if (size_ == ef_ && entry < entries_[size_ - 1]) return false;
    insert(entry);
    return true;
  }

  [[nodiscard]] size_t size() const { return size_; }  ///< rows held, at most ef
  /// The i-th best row and its score, as a rank.
  [[nodiscard]] uint64_t rank(size_t i) const {
    return (entries_[i] & 0xFFFFFFFF00000000U) | (~row_of(entries_[i]) & 0xFFFFFFFFU);
  }

 private:
  static constexpr uint64_t kExpanded = 1;

  // Makes an entry of a rank: its row, of 31 bits, moves up by one, which frees a bit for the mark; the order stays.
  static uint64_t entry_of(float score, uint32_t row) {
    return (pack_rank(score, 0) & 0xFFFFFFFF00000000U) | static_cast<uint32_t>(~row << 1);
  }
  static uint32_t row_of(uint64_t entry) { return ~static_cast<uint32_t>(entry) >> 1; }

  void insert(uint64_t entry) {
    // Binary search without a branch on the data.
    const uint64_t* at = entries_.data();
    for (size_t n = size_; n > 0;) {
      const size_t half = (n + 1) / 2;
      at += at[half - 1] > entry ? half : 0;
      n -= half;
    }
    const auto place = static_cast<size_t>(at - entries_.data());
    std::memmove(entries_.data() + place + 1, entries_.data() + place,
                 (size_ - place) * sizeof entry);
    entries_[place] = entry;
    size_ = std::min(size_ + 1, ef_);
    cursor_ = std::min(cursor_, place);
  }

  std::vector<uint64_t> entries_;  // falling; one more than ef, for the entry that drops out
  size_t ef_ = 0;
  size_t size_ = 0;
  size_t cursor_ = 0;  // all before it are expanded
};

}  // namespace keyhole::index

// The candidates of one head of a group walk. Unlike a sorted beam (sorted_beam.h) it takes rows in bulk, forty at
// a time of which a few are good enough, and is asked for its best only once a round: so it keeps them in no
// order. Taking a row in is a store without a branch on the data; the best is found by looking at all of them,
// four at a time. A sorted beam spent half of a walk's time in mispredicted insertions.
#pragma once

#include <algorithm>
#include <vector>

#include "index/grow.h"
#include "index/scan/select.h"
#include "index/scan/sixteen.h"

namespace keyhole::index {

class Frontier {
 public:
  /// Reserves memory for beams of `ef`; allocates only where that is more than before.
  void reserve(size_t ef) {
    const size_t capacity = open_capacity(ef);
    grow(open_scores_, capacity);
    grow(open_rows_, capacity);
    grow(closed_, capacity);
    grow(spare_, 2 * capacity);
  }

  /// Empties the frontier. A walk is over when the `ef` best rows seen have been expanded.
  void start(size_t ef) {
    ef_ = ef;
    limit_ = open_capacity(ef);
    open_ = 0;
    expanded_ = 0;
    floor_ = kMinusInf;
  }

  /// Takes in the rows that may still be among the best ef.
  void offer(const float* scores, const uint32_t* rows, size_t n) {
    size_t i = 0;
    for (; i + kSixteen <= n; i += kSixteen) {
      if (!all_below(scores + i, floor_)) accept(scores + i, rows + i, kSixteen);
    }
    if (i < n) accept(scores + i, rows + i, n - i);
  }

  /// Returns the best row not yet returned. False: the walk is over for this head.
  [[nodiscard]] bool next(uint32_t& row) {
    if (open_ == 0) return false;
    const size_t best = position_of_largest(open_scores_.data(), open_);
    const float score = open_scores_[best];
    if (expanded_ >= ef_ && count_above(closed_.data(), expanded_, score) >= ef_) return false;
    row = open_rows_[best];
    --open_;
    open_scores_[best] = open_scores_[open_];
    open_rows_[best] = open_rows_[open_];
    if (expanded_ == limit_) shrink();
    closed_[expanded_++] = score;
    return true;
  }

 private:
  static size_t open_capacity(size_t ef) { return (2 * ef + 4 * kSixteen) / kSixteen * kSixteen; }

  void accept(const float* scores, const uint32_t* rows, size_t n) {
    if (open_ + kSixteen > limit_) shrink();
    for (size_t i = 0; i < n; ++i) {
      open_scores_[open_] = scores[i];
      open_rows_[open_] = rows[i];
      open_ += static_cast<size_t>(scores[i] >= floor_);
    }
  }

  // Drops what is not among the best ef. Both lists then have at least kSixteen free places: together they hold ef
  // entries, and ties are dropped arbitrarily but always in the same way.
  void shrink() {
    std::copy_n(open_scores_.data(), open_, spare_.data());
    std::copy_n(closed_.data(), expanded_, spare_.data() + open_);
    floor_ = std::max(floor_, kth_largest(spare_.data(), open_ + expanded_, ef_));
    size_t kept = 0;
    for (size_t i = 0; i < open_; ++i) {
      open_scores_[kept] = open_scores_[i];
      open_rows_[kept] = open_rows_[i];
      kept += static_cast<size_t>(open_scores_[i] >= floor_ && kept < ef_);
    }
    open_ = kept;
    kept = 0;
    for (size_t i = 0; i < expanded_; ++i) {
      closed_[kept] = closed_[i];
      kept += static_cast<size_t>(closed_[i] >= floor_ && kept < ef_);
    }
    expanded_ = kept;
  }

  size_t ef_ = 0;
  size_t limit_ = 0;
  float floor_ = kMinusInf;  // no score below it is among the best ef
  size_t open_ = 0;
  std::vector<float> open_scores_;
  std::vector<uint32_t> open_rows_;
  size_t expanded_ = 0;
  std::vector<float> closed_;  // scores of the rows that were handed out
  std::vector<float> spare_;
};

}  // namespace keyhole::index

// The rows that approximate scores hold to be the best, to be scored again exactly: the best of each head, united
// over the heads, each row once.
#pragma once

#include <algorithm>
#include <span>
#include <vector>

#include "index/graph/row_marks.h"
#include "index/scan/topk.h"

namespace keyhole::index {

class Shortlist {
 public:
  /// Starts the shortlist of the `each` best of at most `count` offers per head, which unite() may follow with
  /// up to `extra` rows more. Allocates only where that is more than ever before.
  void begin(uint32_t group, size_t each, size_t count, size_t extra = 0) {
    group_ = group;
    top_.begin(group, static_cast<uint32_t>(each), count);
    const size_t most = group * each + extra;
    if (rows_.size() <= most) rows_.resize(most + 1);  // a duplicate is written, and overwritten
    marks_.reserve(count + extra);
  }

  /// Offers rows with scores[h * stride + i]. rows: row numbers, or the first of consecutive ones.
  template <class Rows>
  void offer(const float* scores, size_t stride, Rows rows, size_t n) {
    for (uint32_t h = 0; h < group_; ++h) top_.offer(h, scores + h * stride, rows, n);
  }

  /// Ends the streams of offers and returns the shortlist: first the rows [first_extra, row_end), which were not
  /// offered, then those of the first head, then of each further head those that no head before it has. All are below
  /// `row_end`. Valid until the next begin().
  [[nodiscard]] std::span<const uint32_t> unite(size_t first_extra, size_t row_end) {
    size_t n = 0;
    for (size_t row = first_extra; row < row_end; ++row) rows_[n++] = static_cast<uint32_t>(row);
    marks_.begin(row_end);
    for (uint32_t h = 0; h < group_; ++h) {
      for (const uint64_t rank : top_.selected(h)) {
        rows_[n] = rank_row(rank);
        n += static_cast<size_t>(marks_.insert(rank_row(rank)));
      }
    }
    return {rows_.data(), n};
  }

 private:
  uint32_t group_ = 0;
  TopK top_;
  RowMarks marks_;
  std::vector<uint32_t> rows_;
};

}  // namespace keyhole::index

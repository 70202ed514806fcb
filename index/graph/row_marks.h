// A set of rows that can be emptied without touching its memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace keyhole::index {

/// 16-bit tags, one per row: emptying the set touches memory once in 65,535 times. Two bytes a row instead
/// of a bit: no read-modify-write chain between neighbouring rows, and nothing to clear.
class RowMarks {
 public:
  /// Reserves memory for rows below `rows`; allocates only where that is more than before.
  void reserve(size_t rows) {
    if (tags_.size() >= rows) return;
    tags_.assign(rows + rows / 4, 0);  // appends grow an index in steps
    tag_ = 0;
  }
  /// Empties the set. All rows put into it until the next begin() are below `rows`.
  void begin(size_t rows) {
    reserve(rows);
    if (++tag_ == 0) {
      std::fill(tags_.begin(), tags_.end(), uint16_t{0});
      tag_ = 1;
    }
  }
  [[nodiscard]] bool contains(uint32_t row) const { return tags_[row] == tag_; }
  /// Adds the row; returns true if it was not in the set.
  bool insert(uint32_t row) {
    const bool is_new = tags_[row] != tag_;
    tags_[row] = tag_;
    return is_new;
  }

 private:
  std::vector<uint16_t> tags_;  // == tag_: in the set
  uint16_t tag_ = 0;
};

}  // namespace keyhole::index

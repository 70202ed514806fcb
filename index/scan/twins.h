// Rows whose keys are equal. A graph cannot tell them apart: the links of one lead to others of the same key, a beam
// fills with them, and what lies beyond is not found: with 98 % of 10,000 keys equal, searches of `hnsw` found 1 of 200
// others, and for one key beside 20,000 equal ones `roargraph` took 40 times as long as among different ones. So of
// equal keys the lowest row alone, their representative, has a place in a graph. The rows after it, its twins, have no
// links and none lead to them; what a search finds is followed by its twins, which have the same score.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cpu/kernels.h"

namespace keyhole::index {

/// Which rows are twins, of whom. Holds memory for those alone: no rows are alike, no memory.
class Twins {
 public:
  /// None.
  Twins() = default;
  /// Those among all rows of `keys`. Takes a hash of every row, and compares those of equal hashes.
  static Twins among(const cpu::Kernels& kernels, const RowsView& keys) {
    return Twins().grown(kernels, keys);
  }
  /// Those among the rows of `keys`, whose first rows are the ones that these are among.
  [[nodiscard]] Twins grown(const cpu::Kernels& kernels, const RowsView& keys) const;
  /// Forgets rows >= count. Representatives of those that stay do, too: they are lower.
  void truncate(size_t count);

  [[nodiscard]] bool empty() const { return rows_.empty(); }
  [[nodiscard]] size_t size() const { return rows_.size(); }
  /// The twins of a representative, rising; of any other row, none.
  [[nodiscard]] std::span<const uint32_t> of(uint32_t row) const;

  /// Of each row below `count` the representative: itself where it is no twin.
  [[nodiscard]] std::vector<uint32_t> representatives(size_t count) const;
  /// The rows below `count` that are no twins, rising; empty where that is all of them.
  [[nodiscard]] std::vector<uint32_t> distinct(size_t count) const;

  [[nodiscard]] size_t bytes() const;

 private:
  struct Word {
    uint64_t bits = 0;    // which of 64 rows are representatives that have twins
    uint32_t before = 0;  // how many such rows there are before them
  };
  explicit Twins(std::span<const uint32_t> representative);
  [[nodiscard]] uint32_t place(uint32_t row) const;

  std::vector<Word> words_;
  std::vector<uint32_t> starts_;  // in rows_, of each representative's twins; one more at the end
  std::vector<uint32_t> rows_;
};

}  // namespace keyhole::index

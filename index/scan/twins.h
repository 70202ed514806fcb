// Rows whose keys are equal. A graph cannot tell them apart: the links of one lead to others of the same key, a beam
// fills with them, and what lies beyond is not found. With 98 % of 10,000 keys equal, searches of `hnsw` found 1 of
// 200 others; with one key beside 20,000 equal ones, `roargraph` took 40 times as long as among different keys. So of
// equal keys the lowest row alone, their representative, has a place in a graph. The rows after it, its twins, have
// no links and none lead to them; a search that finds the representative returns its twins behind it, with the same
// score.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cpu/kernels.h"

namespace keyhole::index {

/// The twins of some rows, and their representatives. It holds memory for twins and representatives alone: without
/// equal rows, none.
class Twins {
 public:
  /// Knows no twins.
  Twins() = default;
  /// Finds the twins among all rows of `keys`, by a hash of every row and a comparison of rows with equal hashes.
  static Twins among(const cpu::Kernels& kernels, const RowsView& keys) {
    return Twins().grown(kernels, keys);
  }
  /// Finds the twins among the rows of `keys`, which begin with the rows that this object was made from.
  [[nodiscard]] Twins grown(const cpu::Kernels& kernels, const RowsView& keys) const;
  /// Forgets rows >= count. The representative of a row that stays also stays, because it is lower.
  void truncate(size_t count);

  [[nodiscard]] bool empty() const { return rows_.empty(); }
  [[nodiscard]] size_t size() const { return rows_.size(); }
  /// The twins of a representative, rising; none for any other row.
  [[nodiscard]] std::span<const uint32_t> of(uint32_t row) const;

  /// The representative of each row below `count`: the row itself where it is no twin.
  [[nodiscard]] std::vector<uint32_t> representatives(size_t count) const;
  /// The rows below `count` that are no twins, rising; empty where no row is a twin.
  [[nodiscard]] std::vector<uint32_t> distinct(size_t count) const;

  [[nodiscard]] size_t bytes() const;

 private:
  struct Word {
    uint64_t bits = 0;    // which of 64 rows are representatives that have twins
    uint32_t before = 0;  // how many such rows lie before these 64
  };
  explicit Twins(std::span<const uint32_t> representative);
  [[nodiscard]] uint32_t place(uint32_t row) const;

  std::vector<Word> words_;
  std::vector<uint32_t> starts_;  // in rows_, of each representative's twins; one more at the end
  std::vector<uint32_t> rows_;
};

}  // namespace keyhole::index

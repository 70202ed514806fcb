// The union of the rows that the heads of a group have found.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <span>
#include <vector>

#include "index/index.h"

namespace keyhole::runtime {

/// A hash set in place of a sort: it is linear, and keeping what comes first puts the best keys in front.
class RowUnion {
 public:
  /// Sizes it for unions of up to `rows` hits.
  void reserve(size_t rows) {
    rows_.resize(rows);
    table_.assign(std::bit_ceil(2 * rows), 0);
    generation_ = 0;
  }

  /// The union of hits `[group, k]`. Valid until the next call.
  [[nodiscard]] std::span<const uint32_t> of(const index::Hits& hits, uint32_t group, uint32_t k) {
    if (++generation_ == 0) {
      std::fill(table_.begin(), table_.end(), 0);
      generation_ = 1;
    }
    const uint64_t stamp = uint64_t{generation_} << 32;
    const size_t mask = table_.size() - 1;
    size_t size = 0;
    for (uint32_t h = 0; h < group; ++h) {
      for (uint32_t i = 0; i < hits.counts[h]; ++i) {
        const uint32_t id = hits.ids[size_t{h} * k + i];
        const uint64_t entry = stamp | id;
        size_t slot = (id * 0x9E3779B97F4A7C15ULL >> 32) & mask;
        while (table_[slot] >> 32 == generation_ && table_[slot] != entry) slot = (slot + 1) & mask;
        if (table_[slot] == entry) continue;
        table_[slot] = entry;
        rows_[size++] = id;
      }
    }
    return {rows_.data(), size};
  }

  [[nodiscard]] size_t bytes() const {
    return rows_.size() * sizeof(uint32_t) + table_.size() * sizeof(uint64_t);
  }

 private:
  std::vector<uint32_t> rows_;
  std::vector<uint64_t> table_;  // open addressing: (generation << 32) | row
  uint32_t generation_ = 0;      // entries of others are free: nothing is cleared between unions
};

}  // namespace keyhole::runtime

// Rows that lie alone while most rows crowd together. A beam that comes into a crowd of nearly equal keys fills with
// them, and every link that led out of the crowd has lost its place to a nearer key: with 98 % of 10,000 keys alike
// but for noise, searches of `hnsw` found 1 of 200 others. Equal keys have one place in a graph (index/scan/twins.h),
// nearly equal ones cannot. So searches begin at the rows that lie alone, too: there are few, or they find each other.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cpu/shared.h"
#include "index/graph/lifted_keys.h"
#include "index/scan/twins.h"

namespace keyhole::index {

/// The lone rows of some keys. A function of the keys and their number alone, however they came: files need not have
/// them. Ordinary keys have none, and then it holds no memory. Copies hold theirs together.
///
/// A sample says how far rows are from their nearest ones. A few of its rows, the leaders, have most of the sample
/// within some times that distance, or else no row counts as lone: keys then lie along curves or in many small groups.
/// Rows farther from all leaders are lone. The sample is of the rows up to the last power of 2, so that rows that are
/// appended are compared alone with leaders that are there, and all rows with new leaders each time their number
/// has doubled.
class LoneRows {
 public:
  /// Knows no rows.
  LoneRows() = default;
  /// Finds them among all rows of `keys` that are no twins.
  static LoneRows among(const LiftedKeys& keys, const Twins& twins) {
    return LoneRows().of(keys, twins);
  }
  /// Finds them among the rows of `keys`, of which this object knows the first ones, or which are the first ones of
  /// those that it knows.
  [[nodiscard]] LoneRows of(const LiftedKeys& keys, const Twins& twins) const;

  /// All of them, rising.
  [[nodiscard]] std::span<const uint32_t> rows() const {
    return found_ ? std::span<const uint32_t>(found_->rows) : std::span<const uint32_t>();
  }
  /// Where searches begin beside other entries, rising: all, or of many some, evenly spread.
  [[nodiscard]] std::span<const uint32_t> starts() const {
    return found_ ? std::span<const uint32_t>(found_->starts) : std::span<const uint32_t>();
  }
  [[nodiscard]] size_t bytes() const { return found_ ? found_->bytes() : 0; }
  /// The part of bytes() that a copy counts, see cpu/shared.h.
  [[nodiscard]] size_t bytes_of_others() const { return cpu::bytes_of_others(found_); }

 private:
  struct Found {
    double reach = 0.0;  // squared distance to a leader beyond which a row is lone
    std::vector<uint32_t> leaders, rows, starts;
    [[nodiscard]] size_t bytes() const {
      return (leaders.capacity() + rows.capacity() + starts.capacity()) * sizeof(uint32_t);
    }
  };
  /// The leaders of a sample of the first `sampled` rows, and their reach.
  [[nodiscard]] static Found leaders_of(const LiftedKeys& keys,
                                        const std::vector<uint32_t>& representative,
                                        size_t sampled);

  size_t count_ = 0;          // rows seen
  size_t sampled_ = 0;        // rows that the sample is of, a power of 2
  cpu::Shared<Found> found_;  // nothing: there are no leaders
};

}  // namespace keyhole::index

// Rows that lie alone while most rows crowd together. A beam that comes into a crowd of nearly equal keys fills with
// them, and every link that led out of the crowd has lost its place to a nearer key: with 98 % of 10,000 keys alike
// but for noise, searches of `hnsw` found 1 of 200 others. Equal keys have one place in a graph (index/scan/twins.h),
// nearly equal ones cannot. So searches begin at the rows that lie alone, too: there are few, or they find each other.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "index/graph/lifted_keys.h"
#include "index/scan/twins.h"

namespace keyhole::index {

/// The lone rows of some keys. A function of the keys and their number alone, however they came: files need not have
/// them. Ordinary keys have none, and then it holds no memory.
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
  [[nodiscard]] std::span<const uint32_t> rows() const { return rows_; }
  /// Where searches begin beside other entries, rising: all, or of many some, evenly spread.
  [[nodiscard]] std::span<const uint32_t> starts() const { return starts_; }
  /// Without the leaders, of which there are few.
  [[nodiscard]] size_t bytes() const { return (rows_.size() + starts_.size()) * sizeof(uint32_t); }

 private:
  void choose_leaders(const LiftedKeys& keys, const std::vector<uint32_t>& representative);

  size_t count_ = 0;    // rows seen
  size_t sampled_ = 0;  // rows that the sample is of, a power of 2
  double reach_ = 0.0;  // squared distance to a leader beyond which a row is lone
  std::vector<uint32_t> leaders_, rows_, starts_;
};

}  // namespace keyhole::index

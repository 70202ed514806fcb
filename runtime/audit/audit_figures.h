// The findings of audits of one KV head or of many: sums, and histograms of a fixed size for the quantiles. Figures
// of several heads are merged by addition.
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "cpu/types.h"
#include "keyhole/inspect.h"
#include "keyhole/keyhole.h"

namespace keyhole::runtime {

/// The findings of one audit, per query head of the group.
struct AuditResult {
  /// o - o*| / |o*|. Where o* is 0: 0 if o is 0 as well, else 1. Where it is not a number: infinite.
  float error[kMaxGroup];
  float mass[kMaxGroup];     ///< share of the attention mass that was read
  float missing[kMaxGroup];  ///< 1 - mass, without the rounding of a difference
  float recall
      [kMaxGroup];  ///< of the best top_k offloaded keys, how many were attended; if there are any
  bool has_recall = false;
  double seconds = 0.0;  ///< time that the audit took
};

/// Counts of values on a logarithmic scale, 64 steps per factor of 10 from 10^kFrom to 10^kTo: a quantile is
/// off by half a step, 1.8 %, at most. Values beyond the scale are told apart only as the least and the largest.
template <int kFrom, int kTo>
class LogHistogram {
 public:
  static constexpr int kSteps = 64;

  /// Adds a value >= 0; infinity is allowed.
  void add(double value) {
    ++counts_[bucket(value)];
    ++size_;
    if (value < least_) least_ = value;
    if (value > most_) most_ = value;
  }
  void merge(const LogHistogram& other) {
    for (size_t i = 0; i < counts_.size(); ++i) counts_[i] += other.counts_[i];
    size_ += other.size_;
    if (other.least_ < least_) least_ = other.least_;
    if (other.most_ > most_) most_ = other.most_;
  }

  /// The smallest counted value such that a share of all values does not exceed it (nearest rank); 0 if there are
  /// none.
  [[nodiscard]] double quantile(double share) const {
    if (size_ == 0) return 0.0;
    const auto n = static_cast<double>(size_);
    const auto rank = static_cast<uint64_t>(std::fmin(n, std::fmax(1.0, std::ceil(share * n))));
    uint64_t seen = 0;
    size_t i = 0;
    while ((seen += counts_[i]) < rank) ++i;
    if (i == 0) return least_;
    if (i + 1 == counts_.size()) return most_;
    const double middle = std::pow(10.0, kFrom + (static_cast<double>(i) - 0.5) / kSteps);
    return std::fmin(most_, std::fmax(least_, middle));
  }
  [[nodiscard]] double most() const { return size_ == 0 ? 0.0 : most_; }

 private:
  // The first bucket holds all values below the scale, the last all above.
  [[nodiscard]] static size_t bucket(double value) {
    if (!(value >= std::pow(10.0, kFrom))) return 0;
    const double step = (std::log10(value) - kFrom) * kSteps;
    return step >= kBuckets ? kBuckets + 1 : 1 + static_cast<size_t>(std::fmax(0.0, step));
  }

  static constexpr size_t kBuckets = size_t{kTo - kFrom} * kSteps;
  std::array<uint32_t, kBuckets + 2> counts_{};
  uint64_t size_ = 0;
  double least_ = std::numeric_limits<double>::infinity();
  double most_ = 0.0;
};

class AuditFigures {
 public:
  /// Adds one query head of an audit.
  void add(const AuditResult& result, uint32_t head, float estimated_missing, float bound);
  void add_seconds(double seconds) { seconds_ += seconds; }
  void add_wait() { ++waits_; }
  void add_action() { ++actions_; }
  void merge(const AuditFigures& other);

  [[nodiscard]] keyhole_audit summary() const;

 private:
  uint64_t audits_ = 0, over_bound_ = 0, actions_ = 0, waits_ = 0, recalls_ = 0;
  double error_ = 0.0, mass_ = 0.0, recall_ = 0.0;  // sums
  double missing_ = 0.0, estimated_ = 0.0, difference_ = 0.0, seconds_ = 0.0;
  LogHistogram<-8, 2> errors_;
  // Histogram of mass / (1 - mass), which tells small masses apart as well as those next to 1.
  LogHistogram<-8, 8> odds_;
};

}  // namespace keyhole::runtime

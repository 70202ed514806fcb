// The best keys by their int8 codes, scored again in full precision.
#pragma once

#include <vector>

#include "index/base.h"
#include "index/scan/key_codes.h"
#include "index/scan/shortlist.h"

namespace keyhole::index {

/// Working memory of one search over codes. Rows are offered with the scores of their codes; a little more than
/// k of each head then go, each once and scored exactly for all heads, to the collector. Where the collector
/// logs, the scores of the codes go there directly and are said not to be exact.
class Rerank {
 public:
  /// Reserves memory for searches of up to `k` of `count` rows; allocates only where that is more than before.
  void reserve(uint32_t group, uint32_t k, size_t count) {
    shortlist_.begin(group, kept(k, count), count);
    const size_t most = group * std::min(group * kept(k, count), kRowsAtOnce);
    if (scores_.size() < most) scores_.resize(most);
  }

  void begin(const KeyCodes& codes, const SearchArgs& args, size_t count, Collector& collector) {
    collector_ = &collector;
    codes.encode_queries(args.queries, args.group, queries_);
    if (!collector.logging()) reserve(args.group, args.k, count);
  }
  /// The queries that begin() encoded.
  [[nodiscard]] const KeyCodes::Queries& queries() const { return queries_; }

  /// Offers rows with the scores of their codes. rows as in Collector::offer(): row numbers, or the first of
  /// consecutive ones.
  template <class Rows>
  void offer(const float* scores, size_t stride, Rows rows, size_t n) {
    if (collector_->logging()) return collector_->offer(scores, stride, rows, n);
    shortlist_.offer(scores, stride, rows, n);
  }

  void finish(const cpu::Kernels& kernels, const RowsView& keys, const SearchArgs& args,
              SearchCost& cost);

 private:
  // How many rows are scored again at a time, as all heads together may have kept many.
  static constexpr size_t kRowsAtOnce = 1024;
  // How many rows are kept: int8 scores misplace few. With a quarter more than k, recall@100 on the testbed's heads
  // is that of exact scores within 0.001.
  static size_t kept(size_t k, size_t count) { return std::min(k + k / 4 + 16, count); }

  Collector* collector_ = nullptr;
  KeyCodes::Queries queries_;
  Shortlist shortlist_;
  std::vector<float> scores_;
};

}  // namespace keyhole::index

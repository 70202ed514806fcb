// The quality of the rows that a step attended: shared by compare's measurements of indexes and of rivals.
#pragma once

#include <keyhole/keyhole.h>

#include <cstdint>
#include <span>
#include <vector>

#include "tools/commands/common/head_truth.h"

namespace keyhole::tools {

/// A distribution as compare reports it.
struct Percentiles {
  double p50 = 0, p95 = 0, p99 = 0;
};
/// The percentiles of `samples`, by nearest rank; there must be some.
[[nodiscard]] Percentiles percentiles(std::vector<double> samples);

struct OutputError {
  double mean = 0, median = 0, p95 = 0;
};
/// Summarises `errors`, of which there must be some.
[[nodiscard]] OutputError summarise(std::vector<double> errors);

/// Returns |o - o*| / |o*| of row `row`: o `[d]` and lse are the state that an index gave, to be merged with the
/// exact state of the resident tokens.
[[nodiscard]] double output_error(const HeadTruth& truth, size_t row, const float* o, double lse);

/// The worth of distinct rows for one query head.
struct FoundRows {
  size_t hits = 0;  ///< rows that are among the k best
  double mass = 0;  ///< softmax weight of all of them
};

/// Judges rows by exact attention. `truth` must outlive the object.
class RowJudge {
 public:
  /// `rounds_keys`: kv_dtype, in which the rows were scored, is coarser than the trace's elements.
  RowJudge(const HeadTruth& truth, keyhole_dtype kv_dtype, bool rounds_keys);

  /// The rows in ascending order, each once. Throws std::runtime_error for a row that is not offloaded.
  [[nodiscard]] std::vector<uint32_t> distinct(std::span<const uint32_t> rows) const;
  /// Judges distinct rows `ids` for row `row` of the truth.
  [[nodiscard]] FoundRows look_at(size_t row, const std::vector<uint32_t>& ids) const;
  /// The softmax weight of the resident tokens.
  [[nodiscard]] double resident_mass(size_t row) const;
  /// `hits` as a share of the k best.
  [[nodiscard]] double share(size_t hits) const;

 private:
  const HeadTruth& truth_;
  const double tolerance_;
};

}  // namespace keyhole::tools

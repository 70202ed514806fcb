// Measures one index over one recorded head: what it finds and what it costs.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tools/api/handles.h"
#include "tools/commands/common/budget_choice.h"
#include "tools/commands/common/head_answers.h"
#include "tools/commands/common/head_quality.h"
#include "tools/commands/common/head_truth.h"
#include "tools/terminal/clock.h"
#include "tools/terminal/interrupt.h"

namespace keyhole::tools {

/// The tail's estimates of the softmax weight that a step did not read, beside the truth.
struct MissingMass {
  double estimated = 0;       ///< mean
  double estimate_error = 0;  ///< mean of |estimated - true|
  double bytes_per_step = 0;  ///< of those that a step read: means and variances of partitions
  double keys_opened = 0;     ///< keys that a step read to meet a target
};

/// A row of the results: means over all used queries of the head.
struct Measurement {
  std::string series;  ///< the spec as given, perhaps a sweep
  std::string index;   ///< the spec measured
  std::string attend;  ///< e.g. "topk:100"
  std::string tail;    ///< e.g. "second:16"
  std::string target;  ///< e.g. "error=0.05"
  std::string params;  ///< the effective spec
  uint32_t layer = 0, kv_head = 0;
  double middle_mass = 0;
  double sparsity = 0;                      ///< of the head: see HeadTruth::sparsity()
  std::optional<OutputError> output_error;  ///< absent where the trace has no values
  double read_share = 0;      ///< bytes_per_step / bytes of the offloaded keys and values
  double bytes_per_step = 0;  ///< that the search and the attention of one step read
  Percentiles latency_us;
  double missing_mass = 0;             ///< 1 - recovered_mass
  std::optional<MissingMass> missing;  ///< with a tail or a target
  /// With a target: share of the (query, head) samples that kept it, see kErrorSlack and kMassSlack.
  std::optional<double> held;
  double recall = 0;
  double recovered_mass = 0;
  double scan_fraction = 0;
  double keys_attended = 0;  ///< distinct offloaded keys in the state of one step
  double build_seconds = 0;
  double bytes_per_key = 0;
  double tail_build_seconds = 0;  ///< of the partitions, where the row uses any
  double tail_bytes_per_key = 0;  ///< likewise
  std::string diagnostics;        ///< the index's own JSON object of numbers
};

/// Sums over steps; a step is that of all query heads of the group.
struct StepSums {
  double recall = 0, mass = 0, attended = 0;
  uint64_t scored = 0, bytes = 0;
  std::vector<double> errors;  ///< of each query head; none where the trace has no values
};
/// Writes the means of `sums` over all steps of the truth, of an index or rival of `keys` keys; the caller sets
/// read_share.
void put_means(StepSums sums, const HeadTruth& truth, double keys, Measurement& m);

/// Calls run(i) for every step i of the truth and times each one; the times go to `answers`, too, where it is not
/// null.
template <class Run>
[[nodiscard]] Percentiles time_steps(const HeadTruth& truth, const Run& run,
                                     HeadAnswers* answers = nullptr) {
  std::vector<double> microseconds(truth.rows() / truth.group);
  for (size_t i = 0; i < microseconds.size(); ++i) {
    throw_if_interrupted();
    const Clock::time_point start = Clock::now();
    run(i);
    microseconds[i] = microseconds_since(start);
  }
  if (answers != nullptr) answers->step_us = microseconds;
  return percentiles(std::move(microseconds));
}

/// A sample keeps a target where its output error is at most this many times the target, and its recovered mass at
/// most this much below.
inline constexpr double kErrorSlack = 1.5;
inline constexpr double kMassSlack = 0.02;

/// Makes an engine of the recorded model's shape and RoPE, with as many layers as the trace knows. `classifiers`: a
/// file, or empty.
[[nodiscard]] Engine make_trace_engine(const TraceInfo& info, keyhole_dtype kv_dtype,
                                       uint32_t threads, const std::string& classifiers);

/// Builds `index` over the head's offloaded keys. `progress` as keyhole_index_build takes it.
void build_index(const IndexHandle& index, const Trace& trace, const TraceHead& head,
                 const HeadTruth& truth, keyhole_progress_fn progress, void* user);

/// Searches and attends with every used query: once for quality, which warms up, and once for latency. `rounds_keys`:
/// kv_dtype is coarser than the trace's elements. `answers`: takes the answers from which recall is counted; or null.
[[nodiscard]] Measurement measure_index(const IndexHandle& index, const HeadTruth& truth,
                                        const BudgetChoice& budget, keyhole_dtype kv_dtype,
                                        bool rounds_keys, HeadAnswers* answers = nullptr);

}  // namespace keyhole::tools

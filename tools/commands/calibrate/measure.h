// One head of several traces, and what an index and a budget do to it.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tools/api/handles.h"
#include "tools/commands/common/budget_choice.h"
#include "tools/commands/common/head_truth.h"

namespace keyhole::tools {

/// A recorded head, the truth of its used queries and the index that is built over it.
struct CalibrationHead {
  const Trace* trace = nullptr;
  const TraceHead* head = nullptr;
  HeadTruth truth;
  IndexHandle index;
  uint32_t partition = 0;  ///< keys per partition that the index has; 0: none yet

  [[nodiscard]] size_t queries() const { return truth.positions.size(); }
};

/// What steps with one budget gave and took: means over steps.
struct StepFigures {
  std::vector<double> errors;  ///< `[queries * group]` output errors
  double bytes = 0, attended = 0;
  double us = 0;  ///< 0 where it was not timed
};

/// Which queries: every second one from `first` on, or all.
struct QueryChoice {
  size_t first = 0, stride = 1;
};

/// Attends with each of the chosen queries; with `timed`, again for the time: of each query the best of three, as
/// other programs can only slow it down.
[[nodiscard]] StepFigures measure_steps(const CalibrationHead& head, const BudgetChoice& budget,
                                        QueryChoice queries, bool timed);

/// Gives the head an index by this spec: by other search parameters for the one that it has where that will do.
void give_index(CalibrationHead& head, const Engine& engine, const std::string& spec);
/// Partitions the keys where the budget needs it and they are not partitioned so.
void give_partitions(CalibrationHead& head, const BudgetChoice& budget);

/// Bytes that the index holds, and its partitions where the budget needs them.
[[nodiscard]] uint64_t held_bytes(const CalibrationHead& head, const BudgetChoice& budget);

}  // namespace keyhole::tools

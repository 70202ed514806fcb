// Measures one head of several traces under an index and a budget.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tools/api/handles.h"
#include "tools/commands/common/budget_choice.h"
#include "tools/commands/common/head_truth.h"

namespace keyhole::tools {

/// A recorded head, the truth of its used queries, and the index that is built over it.
struct CalibrationHead {
  const Trace* trace = nullptr;
  const TraceHead* head = nullptr;
  HeadTruth truth;
  IndexHandle index;
  uint32_t partition = 0;  ///< keys per partition that the index has; 0: none yet

  [[nodiscard]] size_t queries() const { return truth.positions.size(); }
};

/// The results and costs of steps with one budget: means over steps.
struct StepFigures {
  std::vector<double> errors;  ///< `[queries * group]` output errors
  double bytes = 0, attended = 0;
  double us = 0;  ///< 0 where it was not timed
};

/// The choice of queries: every second one from `first` on, or all.
struct QueryChoice {
  size_t first = 0, stride = 1;
};

/// Attends with each of the chosen queries. With `timed`, again for the time: the best of three for each query,
/// because other programs can only slow it down.
[[nodiscard]] StepFigures measure_steps(const CalibrationHead& head, const BudgetChoice& budget,
                                        QueryChoice queries, bool timed);

/// Gives the head an index of this spec; where the present one differs in search parameters alone, only changes
/// these.
void give_index(CalibrationHead& head, const Engine& engine, const std::string& spec);
/// Partitions the keys as the budget needs, unless they are partitioned so already.
void give_partitions(CalibrationHead& head, const BudgetChoice& budget);

/// Bytes of the index, and of its partitions where the budget needs them.
[[nodiscard]] uint64_t held_bytes(const CalibrationHead& head, const BudgetChoice& budget);

}  // namespace keyhole::tools

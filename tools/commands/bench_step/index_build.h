// Builds of bench-step's sessions: an index and a budget for all heads.
#pragma once

#include <string>

#include "tools/api/handles.h"
#include "tools/commands/bench_step/step_ranks.h"
#include "tools/commands/common/budget_choice.h"

namespace keyhole::tools {

/// Gives all heads the index (null: the one that they have) and the budget, with a progress bar. Returns the seconds
/// that the slowest rank takes to build what is missing. Throws LibraryError, with several ranks std::runtime_error
/// on all, and Interrupted.
double build_indexes(const StepRanks& ranks, const Session& session, const std::string* index,
                     const BudgetChoice& budget);

/// A budget like `first` that needs no partitions.
[[nodiscard]] BudgetChoice without_partitions(const BudgetChoice& first);

}  // namespace keyhole::tools

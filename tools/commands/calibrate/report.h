// Results of calibrate for people and for programs.
#pragma once

#include <string>
#include <vector>

#include "runtime/files/budgets.h"
#include "tools/commands/calibrate/run.h"
#include "tools/terminal/style.h"

namespace keyhole::tools {

/// The shape that a file of budgets is for.
struct ModelDims {
  uint32_t layers = 0, q_heads = 0, kv_heads = 0, head_dim = 0;
};

[[nodiscard]] BudgetsFile to_budgets(const std::vector<HeadChoice>& choices,
                                     const CalibrationPlan& plan, const ModelDims& model,
                                     const std::string& machine);

/// A table with a row for each head.
[[nodiscard]] std::string choice_table(const std::vector<HeadChoice>& choices, const Style& style);

/// Sums over heads compared with exact attention, and what did not come out as required.
[[nodiscard]] std::string choice_summary(const std::vector<HeadChoice>& choices,
                                         const CalibrationPlan& plan);

}  // namespace keyhole::tools

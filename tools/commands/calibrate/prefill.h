// calibrate --prefill: a pattern for the prompts of every query head.
#pragma once

#include <string>
#include <vector>

#include "runtime/files/budgets.h"
#include "tools/commands/calibrate/pattern_search.h"
#include "tools/commands/common/model_options.h"
#include "tools/commands/common/task_options.h"
#include "tools/terminal/style.h"

namespace keyhole::tools {

struct PrefillPlan {
  ModelOptions model;
  TaskOptions task;  ///< without a task: one of kv, and prose
  Requirement requirement;
  PatternCost cost = PatternCost::blocks;
  std::vector<std::string> patterns;  ///< expand_patterns()
  std::vector<uint32_t> layers;       ///< of those without a sliding window; empty: all
  uint32_t threads = 0;
};

struct PatternChoice {
  uint32_t layer = 0, q_head = 0;  ///< the layer among those without a sliding window
  PatternFigures figures, dense;
};

/// Runs the model densely over the prompts where plan.model.device says, attends there, and tries every pattern on
/// every query head of its layers. The last layer has no patterns, because only a prompt's last token attends there.
/// Shows progress on a terminal; Ctrl-C ends it.
[[nodiscard]] std::vector<PatternChoice> calibrate_prefill(const PrefillPlan& plan);

[[nodiscard]] BudgetsFile to_budgets(const std::vector<PatternChoice>& choices,
                                     const PrefillPlan& plan, const std::string& machine);
[[nodiscard]] std::string pattern_table(const std::vector<PatternChoice>& choices,
                                        const Style& style);
/// Shares and speed over all heads, and the choices that have not held.
[[nodiscard]] std::string pattern_summary(const std::vector<PatternChoice>& choices,
                                          const PrefillPlan& plan);

}  // namespace keyhole::tools

// The rows of a plan: what the library says that each index takes, and which codes the card then has.
#pragma once

#include <keyhole/inspect.h>

#include <string>
#include <vector>

#include "tools/commands/plan/card_codes.h"
#include "tools/commands/plan/plan_request.h"

namespace keyhole::tools {

/// An index and what it takes.
struct PlanRow {
  std::string index;
  keyhole_memory_plan plan;
  CardCodes codes;  ///< those on the card, where there are any
};

/// Plans a session with an index, and a budgets file where one is named. Throws UsageError.
[[nodiscard]] PlanRow plan_row(const PlanRequest& request, const PlanOptions& options,
                               const std::string& index, const std::string& budgets = {});

/// Adds what the next better choice would take, where some codes of the last row's index or their lists are not on the
/// device, or where `auto` has chosen fewer bits than there are.
void add_next_better(const PlanRequest& request, const PlanOptions& options,
                     std::vector<PlanRow>& rows);

}  // namespace keyhole::tools

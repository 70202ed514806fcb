// Plans as people read them and as JSON.
#pragma once

#include <keyhole/keyhole.h>

#include <string>
#include <vector>

#include "runtime/files/json.h"
#include "tools/commands/plan/plan_request.h"
#include "tools/commands/plan/plan_rows.h"

namespace keyhole::tools {

void print_plan(const PlanRequest& request, const std::vector<PlanRow>& rows);
[[nodiscard]] nlohmann::ordered_json plan_json(const PlanRequest& request,
                                               const PlanOptions& options,
                                               const std::vector<PlanRow>& rows);

}  // namespace keyhole::tools

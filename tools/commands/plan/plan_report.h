// Plans as people read them and as JSON.
#pragma once

#include <keyhole/inspect.h>
#include <keyhole/keyhole.h>

#include <string>
#include <vector>

#include "runtime/files/json.h"
#include "tools/commands/plan/plan_request.h"

namespace keyhole::tools {

/// An index and what it takes.
struct PlanRow {
  std::string index;
  keyhole_memory_plan plan;
};

void print_plan(const PlanRequest& request, const std::vector<PlanRow>& rows);
[[nodiscard]] nlohmann::ordered_json plan_json(const PlanRequest& request,
                                               const PlanOptions& options,
                                               const std::vector<PlanRow>& rows);

}  // namespace keyhole::tools

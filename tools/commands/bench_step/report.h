// bench-step's results for people and for machines.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "tools/commands/bench_step/results.h"
#include "tools/terminal/style.h"

namespace keyhole::tools {

/// Some lines on one result, for the moment at which it is known.
[[nodiscard]] std::string to_text(const StepResult& result);
/// All of them, a row each.
[[nodiscard]] std::string to_table(const std::vector<StepResult>& results, const Style& style);
/// What the machine can do at best; "" where nothing of it was measured.
[[nodiscard]] std::string to_text(const StepFloors& floors);

[[nodiscard]] nlohmann::ordered_json to_json(const StepResult& result);
[[nodiscard]] nlohmann::ordered_json to_json(const StepFloors& floors);

}  // namespace keyhole::tools

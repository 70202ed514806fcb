// What calibrate chose as JSON, and as a page that is made of it.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "tools/commands/calibrate/prefill.h"
#include "tools/commands/calibrate/run.h"
#include "tools/terminal/machine.h"

namespace keyhole::tools {

/// The figures of the table, by head: beside the file of budgets, which holds what the library takes.
[[nodiscard]] nlohmann::ordered_json calibration_document(const std::vector<HeadChoice>& choices,
                                                          const CalibrationPlan& plan,
                                                          const Machine& machine);
[[nodiscard]] nlohmann::ordered_json calibration_document(const std::vector<PatternChoice>& choices,
                                                          const PrefillPlan& plan,
                                                          const Machine& machine);

/// Of either.
[[nodiscard]] std::string calibration_page(const nlohmann::ordered_json& document);

}  // namespace keyhole::tools

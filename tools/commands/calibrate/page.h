// The choices of calibrate as JSON, and as a page that is made of it.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "tools/commands/calibrate/prefill.h"
#include "tools/commands/calibrate/run.h"
#include "tools/terminal/machine.h"

namespace keyhole::tools {

/// The figures of the table, by head. They accompany the file of budgets, which holds only what the library takes.
[[nodiscard]] nlohmann::ordered_json calibration_document(const std::vector<HeadChoice>& choices,
                                                          const CalibrationPlan& plan,
                                                          const Machine& machine);
[[nodiscard]] nlohmann::ordered_json calibration_document(const std::vector<PatternChoice>& choices,
                                                          const PrefillPlan& plan,
                                                          const Machine& machine);

/// The page of a document of budgets or of patterns.
[[nodiscard]] std::string calibration_page(const nlohmann::ordered_json& document);

}  // namespace keyhole::tools

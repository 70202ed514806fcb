// The results of `keyhole prefill`, for people and machines.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "tools/llama/gpu_model.h"
#include "tools/llama/prefill.h"
#include "tools/terminal/style.h"

namespace keyhole::tools {

/// One pattern's figures of a prompt.
struct PrefillMeasurement {
  std::string pattern;
  double share = 1;        ///< of the blocks that queries see those that they attend
  double seconds = 0;      ///< until the first token is known
  PrefillTimes stages;     ///< all 0 of a turn
  bool same_token = true;  ///< as dense attention gives
  std::vector<GpuModel::PrefillErrors>
      errors;  ///< by layer; empty: not measured, and of dense attention
};

/// A table with a row for each pattern.
[[nodiscard]] std::string prefill_table(const std::vector<PrefillMeasurement>& all,
                                        const Style& style);
/// A table of errors, p50 and p95, with rows of layers and columns of patterns; empty where nothing was measured.
[[nodiscard]] std::string prefill_error_table(const std::vector<PrefillMeasurement>& all,
                                              const Style& style);
[[nodiscard]] nlohmann::ordered_json prefill_json(const std::vector<PrefillMeasurement>& all);
/// CSV with a row for each pattern and layer with errors, or one for a pattern without errors.
[[nodiscard]] std::string prefill_csv(const std::vector<PrefillMeasurement>& all);

}  // namespace keyhole::tools

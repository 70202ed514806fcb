// bench-step's results for people and for machines.
#pragma once

#include <array>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "tools/commands/bench_step/results.h"
#include "tools/terminal/style.h"

namespace keyhole::tools {

/// Some lines about one result, printed as soon as it is known.
[[nodiscard]] std::string to_text(const StepResult& result);

/// Seconds of a build, as tables show them: of the index and of the tail together. Tails below 10 ms do not count,
/// because that is the time of finding that there are none.
[[nodiscard]] inline double shown_build(double index_seconds, double tail_seconds) {
  return index_seconds + (tail_seconds > 0.01 ? tail_seconds : 0.0);
}

/// Titles of the table's columns, which a page has too.
inline constexpr std::array kStepColumns = {
    "index and budget", "build",       "layer p50", "p95", "p99", "token p50", "p95",
    "tokens/s",         "read/attend", "error p50", "p95", "p99", "recall",    "mass"};
/// A table of all results, a row each.
[[nodiscard]] std::string to_table(const std::vector<StepResult>& results, const Style& style);
/// The best that the machine can do; "" where nothing of it was measured.
[[nodiscard]] std::string to_text(const StepFloors& floors);

/// StepResult::codes_floor of what a session's statistics say; none where a layer is attended otherwise, or the
/// device's `copy_bandwidth`, bytes/s, is not known (0).
[[nodiscard]] std::optional<double> codes_floor(const keyhole_statistics& statistics,
                                                uint32_t layers, double copy_bandwidth);

[[nodiscard]] nlohmann::ordered_json to_json(const StepResult& result);
[[nodiscard]] nlohmann::ordered_json to_json(const StepFloors& floors);

}  // namespace keyhole::tools

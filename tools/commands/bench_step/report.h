// bench-step's results for people and for machines.
#pragma once

#include <array>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "tools/commands/bench_step/results.h"
#include "tools/terminal/style.h"

namespace keyhole::tools {

/// Some lines on one result, for the moment at which it is known.
[[nodiscard]] std::string to_text(const StepResult& result);

/// Seconds of a build as tables show them, of indexes and of tails. Below 10 ms the time of tails is that of finding none.
[[nodiscard]] inline double shown_build(double index_seconds, double tail_seconds) {
  return index_seconds + (tail_seconds > 0.01 ? tail_seconds : 0.0);
}

/// Titles of the table's columns, which a page has too.
inline constexpr std::array kStepColumns = {
    "index and budget", "build",       "layer p50", "p95", "p99", "token p50", "p95",
    "tokens/s",         "read/attend", "error p50", "p95", "p99", "recall",    "mass"};
/// All of them, a row each.
[[nodiscard]] std::string to_table(const std::vector<StepResult>& results, const Style& style);
/// What the machine can do at best; "" where nothing of it was measured.
[[nodiscard]] std::string to_text(const StepFloors& floors);

[[nodiscard]] nlohmann::ordered_json to_json(const StepResult& result);
[[nodiscard]] nlohmann::ordered_json to_json(const StepFloors& floors);

}  // namespace keyhole::tools

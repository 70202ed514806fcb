// compare's summary under the names that ann-benchmarks, VIBE and big-ann use.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace keyhole::tools {

/// A row for each way over all heads, made from the JSON result. qps: query heads per second of one thread, group /
/// median step; p50, p95, p99: milliseconds of a step; distcomps: keys scored by a step; build_time: seconds, all
/// heads; index_size: kB of 1024 bytes, all heads, without K and V. Behind them come columns that the tables of
/// ann-benchmarks lack: output_error, recovered_mass, bytes_per_step.
[[nodiscard]] std::string ann_csv(const nlohmann::ordered_json& document);

}  // namespace keyhole::tools

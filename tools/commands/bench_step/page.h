// bench-step's results as a page, made of the JSON result alone.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace keyhole::tools {

[[nodiscard]] std::string bench_step_page(const nlohmann::ordered_json& document);

}  // namespace keyhole::tools

// bench-step's results as a page and as a picture, made of the JSON result alone.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace keyhole::tools {

[[nodiscard]] std::string bench_step_page(const nlohmann::ordered_json& document);
/// A picture of output error against the time of a layer and against memory; "" if nothing was audited.
[[nodiscard]] std::string bench_step_svg(const nlohmann::ordered_json& document);

}  // namespace keyhole::tools

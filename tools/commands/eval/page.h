// eval's results as a page, made of the JSON result alone.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace keyhole::tools {

/// The page of any task: questions, copy and text.
[[nodiscard]] std::string eval_page(const nlohmann::ordered_json& document);

}  // namespace keyhole::tools

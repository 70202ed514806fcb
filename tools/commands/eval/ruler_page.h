// The page of `eval --task ruler`, made of the JSON result alone.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace keyhole::tools {

/// Mean scores by way and length, scores of each task, curves over several lengths, all figures.
[[nodiscard]] std::string ruler_page(const nlohmann::ordered_json& document);

}  // namespace keyhole::tools

// The page of `eval --task drafts`, made of the JSON result alone.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace keyhole::tools {

/// Accepted tokens by way, shares by the place in a draft, all figures.
[[nodiscard]] std::string draft_page(const nlohmann::ordered_json& document);

}  // namespace keyhole::tools

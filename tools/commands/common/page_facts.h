// What the pages of all commands say alike of a JSON result.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "tools/page/page.h"

namespace keyhole::tools {

/// The figure of a row by its name, "latency_us.p50" for one inside another; NaN where it is null or not there.
[[nodiscard]] double figure_at(const nlohmann::ordered_json& row, const std::string& field);

/// The machine and the version, of a document with "machine" as to_json(Machine) writes it.
void put_page_facts(Page& page, const nlohmann::ordered_json& document);

/// A section with the command that a document was made by ("command").
void put_page_command(Page& page, const nlohmann::ordered_json& document);

}  // namespace keyhole::tools

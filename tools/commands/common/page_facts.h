// The parts that the pages of all commands show in the same way from a JSON result.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "tools/page/page.h"

namespace keyhole::tools {

/// The figure of a row by its name, "latency_us.p50" for one inside another; NaN where it is null or not there.
[[nodiscard]] double figure_at(const nlohmann::ordered_json& row, const std::string& field);

/// Puts the machine and the version of a document on the page; its "machine" is as to_json(Machine) writes it.
void put_page_facts(Page& page, const nlohmann::ordered_json& document);

/// Adds a section with the command by which a document was made ("command").
void put_page_command(Page& page, const nlohmann::ordered_json& document);

}  // namespace keyhole::tools

// eval's results as a page, made of the JSON result alone.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "tools/page/page.h"

namespace keyhole::tools {

/// The page of any task.
[[nodiscard]] std::string eval_page(const nlohmann::ordered_json& document);

/// Puts the machine, the model, the cache and the prompt of a result on a page.
void put_eval_facts(Page& page, const nlohmann::ordered_json& document);
/// The way of a row of results as text: its index, or the file of --budgets, and its budget.
[[nodiscard]] std::string way_text(const nlohmann::ordered_json& row);

}  // namespace keyhole::tools

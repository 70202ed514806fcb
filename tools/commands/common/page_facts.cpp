#include "tools/commands/common/page_facts.h"

#include <algorithm>
#include <limits>

#include "runtime/files/json.h"
#include "tools/terminal/units.h"

namespace keyhole::tools {

using nlohmann::ordered_json;

double figure_at(const ordered_json& row, const std::string& field) {
  const ordered_json* at = &row;
  for (size_t begin = 0; begin <= field.size();) {
    const size_t end = std::min(field.find('.', begin), field.size());
    const auto next = at->is_object() ? at->find(field.substr(begin, end - begin))
                                      : ordered_json::const_iterator();
    if (!at->is_object() || next == at->end()) return std::numeric_limits<double>::quiet_NaN();
    at = &*next;
    begin = end + 1;
  }
  return at->is_number() ? at->get<double>() : std::numeric_limits<double>::quiet_NaN();
}

void put_page_facts(Page& page, const ordered_json& document) {
  const ordered_json& machine = document["machine"];
  const std::string simd = machine["simd"];
  const uint64_t cores = machine["cores"];
  page.fact("machine",
            machine["cpu"].get<std::string>() + ", " + std::to_string(cores) +
                (cores == 1 ? " core, " : " cores, ") + format_bytes(machine["memory_bytes"]) +
                (simd.empty() ? "" : ", " + simd) + "; " + machine["system"].get<std::string>());
  page.fact("keyhole", machine["keyhole"].get<std::string>());
}

void put_page_command(Page& page, const ordered_json& document) {
  page.section("The command");
  page.verbatim(document["command"].get<std::string>());
}

}  // namespace keyhole::tools

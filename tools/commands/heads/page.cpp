
#include "tools/page/page.h"
#include "runtime/files/json.h"
#include "tools/commands/common/head_grid.h"
#include "tools/commands/common/page_facts.h"
#include "tools/commands/heads/profile.h"
#include "tools/terminal/units.h"

namespace keyhole::tools {

using nlohmann::ordered_json;

std::string heads_page(const ordered_json& document) {
  const ordered_json& rows = document["heads"];
  const ordered_json& trace = document["trace"];
  const ordered_json& options = document["options"];
  const std::string held = format_number(100 * options["mass"].get<double>()) + " %";
  Page page("keyhole heads: " + trace["model"].get<std::string>());
  put_page_facts(page, document);
  page.fact("prompt", trace["task"].get<std::string>() + ", " + format_count(trace["tokens"]) +
                          " tokens, " + options["queries"].dump() + " queries; sink " +
                          options["sink"].dump() + ", window " + options["window"].dump() + ", " +
                          format_count(options["offloaded"]) + " tokens in the middle");

  page.section("Where the attention lies",
               "Shares of the softmax weight, means over queries and query heads. What lies in the "
               "middle is what an index is for; a head that has none there is content with sink "
               "and window.");
  const HeadGrid grid(rows);
  page.add(std::vector{
      grid.map_of(rows, "in the middle", "middle_mass", Scale::linear),
      grid.map_of(rows, "in the sink", "sink_mass", Scale::linear),
      grid.map_of(rows, "in the window", "window_mass", Scale::linear),
      grid.map_of(rows, "tokens that hold " + held + " of the weight", "tokens", Scale::log, 1),
      grid.map_of(rows, "of the middle's weight", "middle_tokens", Scale::log, 1),
      grid.map_of(rows, "sparsity: share of tokens not needed for it", "sparsity", Scale::nines,
                  1e-6)});
  Bars bars;
  bars.parts = {"sink", "window", "middle"};
  bars.full = 1;
  PageTable table;
  for (const std::string& title : profile_titles(options["mass"])) table.columns.push_back({title});
  for (const ordered_json& row : rows) {
    const auto number = [&](const char* field) { return format_number(figure_at(row, field), 4); };
    bars.bars.push_back({"layer " + row["layer"].dump() + ", KV head " + row["kv_head"].dump(),
                         {figure_at(row, "sink_mass"), figure_at(row, "window_mass"),
                          figure_at(row, "middle_mass")},
                         number("middle_mass") + " in the middle"});
    table.rows.push_back({row["layer"].dump(), row["kv_head"].dump(), number("sink_mass"),
                          number("window_mass"), number("middle_mass"), number("largest_weight"),
                          number("tokens"), number("tokens_p95"), number("middle_tokens"),
                          number("sparsity")});
  }
  page.section("Head by head");
  // As many rows as a person looks through; maps and table have them all.
  constexpr size_t kMostBars = 64;
  if (bars.bars.size() <= kMostBars) page.add(bars);
  page.add(table);
  put_page_command(page, document);
  return page.html(document);
}

}  // namespace keyhole::tools

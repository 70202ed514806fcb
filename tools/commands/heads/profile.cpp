#include "tools/commands/heads/profile.h"

#include <algorithm>
#include <cstdio>
#include <sstream>

#include "runtime/files/json.h"
#include "tools/commands/common/quantile.h"
#include "tools/terminal/table.h"
#include "tools/terminal/units.h"

namespace keyhole::tools {
namespace {

using nlohmann::ordered_json;

std::string percent(double share) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f %%", 100 * share);
  return text;
}

}  // namespace

HeadProfile profile_of(const HeadTruth& truth, uint32_t layer, uint32_t kv_head) {
  HeadProfile out;
  out.layer = layer;
  out.kv_head = kv_head;
  const auto rows = static_cast<double>(truth.spread.size());
  std::vector<double> tokens;
  for (const WeightSpread& row : truth.spread) {
    out.sink_mass += row.sink / rows;
    out.window_mass += row.window / rows;
    out.middle_mass += row.middle / rows;
    out.largest_weight += row.largest / rows;
    out.tokens += row.covering / rows;
    out.middle_tokens += row.covering_middle / rows;
    tokens.push_back(row.covering);
  }
  out.sparsity = truth.sparsity();
  std::sort(tokens.begin(), tokens.end());
  out.tokens_p95 = nearest_rank(tokens, 0.95);
  return out;
}

ordered_json to_json(const HeadProfile& p) {
  return {{"layer", p.layer},
          {"kv_head", p.kv_head},
          {"sink_mass", p.sink_mass},
          {"window_mass", p.window_mass},
          {"middle_mass", p.middle_mass},
          {"largest_weight", p.largest_weight},
          {"tokens", p.tokens},
          {"tokens_p95", p.tokens_p95},
          {"middle_tokens", p.middle_tokens},
          {"sparsity", p.sparsity}};
}

std::string to_csv(const std::vector<HeadProfile>& profiles) {
  std::ostringstream out;
  for (const HeadProfile& p : profiles) {
    const ordered_json row = to_json(p);
    std::string names, values;
    for (const auto& [name, value] : row.items()) {
      names += (names.empty() ? "" : ",") + name;
      values += (values.empty() ? "" : ",") + value.dump();
    }
    if (&p == &profiles.front()) out << names << '\n';
    out << values << '\n';
  }
  return out.str();
}

std::vector<std::string> profile_titles(double share) {
  return {"layer",
          "KV head",
          "sink",
          "window",
          "middle",
          "largest",
          "tokens for " + format_number(100 * share) + " %",
          "p95",
          "of the middle's",
          "sparsity"};
}

std::string profile_table(const std::vector<HeadProfile>& profiles, double share,
                          const Style& style) {
  std::vector<Table::Column> columns;
  for (const std::string& title : profile_titles(share)) columns.push_back({title});
  Table table(std::move(columns));
  for (const HeadProfile& p : profiles) {
    table.add_row({std::to_string(p.layer), std::to_string(p.kv_head), percent(p.sink_mass),
                   percent(p.window_mass), percent(p.middle_mass), percent(p.largest_weight),
                   format_number(p.tokens), format_number(p.tokens_p95),
                   format_number(p.middle_tokens), percent(p.sparsity)});
  }
  return table.text(style);
}

}  // namespace keyhole::tools

#include "tools/commands/common/head_grid.h"

#include <limits>
#include <utility>

#include "runtime/files/json.h"
#include "tools/commands/common/page_facts.h"

namespace keyhole::tools {

using nlohmann::ordered_json;

HeadGrid::HeadGrid(const ordered_json& rows, std::string head) : head_(std::move(head)) {
  for (const ordered_json& row : rows) {
    layers_.emplace(row["layer"].get<uint32_t>(), 0);
    heads_.emplace(row[head_].get<uint32_t>(), 0);
  }
  for (auto* numbers : {&layers_, &heads_}) {
    size_t place = 0;
    for (auto& [number, at] : *numbers) at = place++;
  }
}

size_t HeadGrid::cell(const ordered_json& row) const {
  return layers_.at(row["layer"]) * heads_.size() + heads_.at(row[head_]);
}

HeatMap HeadGrid::map(std::string title, std::string field, Scale scale, double limit) const {
  HeatMap out;
  out.title = std::move(title);
  out.field = std::move(field);
  out.column_title = head_ == "q_head" ? "query head" : "KV head";
  out.scale = scale;
  out.limit = limit;
  for (const auto& [number, at] : layers_) out.rows.push_back(std::to_string(number));
  for (const auto& [number, at] : heads_) out.columns.push_back(std::to_string(number));
  out.values.assign(cells(), std::numeric_limits<double>::quiet_NaN());
  return out;
}

HeatMap HeadGrid::map_of(const ordered_json& rows, std::string title, std::string field,
                         Scale scale, double limit) const {
  HeatMap out = map(std::move(title), std::move(field), scale, limit);
  for (const ordered_json& row : rows) out.values[cell(row)] = figure_at(row, out.field);
  return out;
}

}  // namespace keyhole::tools

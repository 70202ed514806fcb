#include "tools/commands/prefill/report.h"

#include <algorithm>
#include <sstream>

#include "runtime/files/json.h"
#include "tools/terminal/csv.h"
#include "tools/terminal/table.h"
#include "tools/terminal/units.h"

namespace keyhole::tools {
namespace {

using nlohmann::ordered_json;

struct Stage {
  const char* name;
  double PrefillTimes::*seconds;
};
constexpr Stage kStages[] = {{"weights", &PrefillTimes::weights},
                             {"projections", &PrefillTimes::projections},
                             {"attention", &PrefillTimes::attention},
                             {"mlp", &PrefillTimes::mlp},
                             {"logits", &PrefillTimes::logits}};

/// The worst layer's.
double worst(const PrefillMeasurement& m, double GpuModel::PrefillErrors::*which) {
  double most = 0;
  for (const GpuModel::PrefillErrors& e : m.errors) most = std::max(most, e.*which);
  return most;
}

}  // namespace

std::string prefill_table(const std::vector<PrefillMeasurement>& all, const Style& style) {
  const bool stages = !all.empty() && all.front().stages.attention > 0;  // none of a turn
  std::vector<Table::Column> columns = {{"pattern", Table::Align::left}, {"blocks"}};
  for (const Stage& stage : kStages) {
    if (stages) columns.push_back({stage.name});
  }
  for (const char* title : {"first token", "speed-up", "error p50", "error p95"}) {
    columns.push_back({title});
  }
  columns.push_back({"same token", Table::Align::left});
  Table table(std::move(columns));
  for (const PrefillMeasurement& m : all) {
    std::vector<std::string> row = {m.pattern, format_number(100 * m.share) + " %"};
    for (const Stage& stage : kStages) {
      if (stages) row.push_back(format_duration(m.stages.*stage.seconds));
    }
    row.push_back(format_duration(m.seconds));
    row.push_back(format_number(all.front().seconds / m.seconds) + "x");
    const bool has = !m.errors.empty();
    row.push_back(has ? format_number(worst(m, &GpuModel::PrefillErrors::median)) : "-");
    row.push_back(has ? format_number(worst(m, &GpuModel::PrefillErrors::p95)) : "-");
    row.emplace_back(m.same_token ? "yes" : "no");
    table.add_row(std::move(row));
  }
  return table.text(style);
}

std::string prefill_error_table(const std::vector<PrefillMeasurement>& all, const Style& style) {
  std::vector<Table::Column> columns = {{"layer"}};
  const PrefillMeasurement* longest = nullptr;
  for (const PrefillMeasurement& m : all) {
    if (m.errors.empty()) continue;
    longest = &m;
    columns.push_back({m.pattern + " p50"});
    columns.push_back({"p95"});
  }
  if (longest == nullptr) return "";
  Table table(std::move(columns));
  for (size_t i = 0; i < longest->errors.size(); ++i) {
    std::vector<std::string> row = {std::to_string(longest->errors[i].layer)};
    for (const PrefillMeasurement& m : all) {
      if (m.errors.empty()) continue;
      row.push_back(format_number(m.errors[i].median));
      row.push_back(format_number(m.errors[i].p95));
    }
    table.add_row(std::move(row));
  }
  return table.text(style);
}

ordered_json prefill_json(const std::vector<PrefillMeasurement>& all) {
  ordered_json out = ordered_json::array();
  for (const PrefillMeasurement& m : all) {
    ordered_json stages, errors = ordered_json::array();
    for (const Stage& stage : kStages)
      stages[std::string(stage.name) + "_s"] = m.stages.*stage.seconds;
    for (const GpuModel::PrefillErrors& e : m.errors) {
      errors.push_back({{"layer", e.layer}, {"p50", e.median}, {"p95", e.p95}});
    }
    out.push_back({{"pattern", m.pattern},
                   {"blocks", m.share},
                   {"first_token_s", m.seconds},
                   {"stages", stages},
                   {"same_token", m.same_token},
                   {"errors", errors}});
  }
  return out;
}

std::string prefill_csv(const std::vector<PrefillMeasurement>& all) {
  constexpr int kDigits = 9;
  std::ostringstream out;
  out.precision(kDigits);
  out << "pattern,blocks,first_token_s";
  for (const Stage& stage : kStages) out << ',' << stage.name << "_s";
  out << ",same_token,layer,error_p50,error_p95\n";
  for (const PrefillMeasurement& m : all) {
    std::ostringstream start;
    start.precision(kDigits);
    start << csv_text(m.pattern) << ',' << m.share << ',' << m.seconds;
    for (const Stage& stage : kStages) start << ',' << m.stages.*stage.seconds;
    start << ',' << (m.same_token ? 1 : 0);
    if (m.errors.empty()) out << start.str() << ",,,\n";
    for (const GpuModel::PrefillErrors& e : m.errors) {
      out << start.str() << ',' << e.layer << ',' << e.median << ',' << e.p95 << '\n';
    }
  }
  return out.str();
}

}  // namespace keyhole::tools

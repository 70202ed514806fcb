#include "tools/commands/bench_step/page.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "runtime/files/json.h"
#include "tools/commands/bench_step/report.h"
#include "tools/commands/common/page_facts.h"
#include "tools/page/page.h"
#include "tools/terminal/units.h"

namespace keyhole::tools {
namespace {

using nlohmann::ordered_json;

constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();

// The error of a step: for stream steps, and for several ranks, that of what they wrote, otherwise that of the
// audits.
double error_of(const ordered_json& row, const std::string& quantile) {
  const double written = figure_at(row, "written_error." + quantile);
  if (std::isfinite(written)) return written;
  return figure_at(row, quantile == "p50" ? "audit.error.median" : "audit.error." + quantile);
}

// A sum of the statistics for each attend.
double per_attend(const ordered_json& row, const std::string& field) {
  const double attends = figure_at(row, "statistics.attends");
  return attends > 0 ? figure_at(row, "statistics." + field) / attends : kUnknown;
}

// Bytes of memory on the host and, where codes lie there, on the device.
double memory_of(const ordered_json& row) {
  double bytes = 0;
  for (const char* part : {"index_bytes", "tail_bytes", "code_bytes"}) {
    bytes += figure_at(row, std::string("statistics.") + part);
  }
  return bytes;
}

// The ranks as text; "" for one process.
std::string ranks_of(const ordered_json& options) {
  if (options["parallel"].is_null()) return "";
  return options["ranks"].dump() + " of --parallel " + options["parallel"].get<std::string>();
}

std::string budget_text(const ordered_json& row) {
  if (row["comparison"]) return "comparison";
  std::string text = row["attend"];
  if (row["tail"] != "none") text += ", tail " + row["tail"].get<std::string>();
  if (row["target"] != "none") text += ", " + row["target"].get<std::string>();
  return text;
}

/// The quantities of its curves.
enum Quantity : size_t { kLayer, kRead, kMemory, kError, kRecall, kMass };

Curves curves_of(const ordered_json& rows) {
  Curves out;
  out.quantities = {
      {"layer_us.p50", "time of a layer, median us", Scale::log},
      {"statistics.bytes_read", "bytes of host memory read by an attend (from 1)", Scale::log, 1},
      {"statistics.index_bytes", "memory of indexes, tails and codes, bytes (from 1)", Scale::log,
       1},
      {"error", "output error, median (below 0.0001 drawn there)", Scale::log, 1e-4},
      {"audit.recall", "recall", Scale::linear, 0, true},
      {"audit.mass.mean", "recovered mass (above 0.9999 drawn there)", Scale::nines, 1e-4, true}};
  Curves::View& view = out.views.emplace_back();
  view.name = "all";
  for (const ordered_json& row : rows) {
    const double error = error_of(row, "p50");
    if (row["comparison"] || row["layer_us"].is_null() || !std::isfinite(error)) continue;
    out.points.push_back(
        {out.series_of(row["series"], budget_text(row)), row["name"].get<std::string>()});
    view.values.push_back({figure_at(row, "layer_us.p50"), per_attend(row, "bytes_read"),
                           memory_of(row), error, figure_at(row, "audit.recall"),
                           figure_at(row, "audit.mass.mean")});
  }
  for (const size_t worth : {kError, kRecall, kMass}) {
    for (const size_t cost : {kLayer, kRead, kMemory}) out.panels.emplace_back(cost, worth);
  }
  return out;
}

// Worker time of an attend by stage.
Bars stages_of(const ordered_json& rows) {
  struct Stage {
    const char* name;
    const char* field;
    const char* without;  ///< a stage that it contains
  };
  constexpr Stage kStages[] = {{"search", "search_seconds", "tail_seconds"},
                               {"tail", "tail_seconds", nullptr},
                               {"offloaded attention", "offload_seconds", nullptr},
                               {"resident attention", "resident_seconds", nullptr},
                               {"appends", "append_seconds", nullptr},
                               {"the device waited", "device_wait_seconds", nullptr}};
  Bars out;
  out.unit = "us";
  for (const Stage& stage : kStages) out.parts.emplace_back(stage.name);
  for (const ordered_json& row : rows) {
    if (row["statistics"].is_null()) continue;
    Bars::Bar& bar = out.bars.emplace_back();
    bar.name = row["name"];
    for (const Stage& stage : kStages) {
      const double all = per_attend(row, stage.field);
      bar.parts.push_back(1e6 *
                          (stage.without == nullptr ? all : all - per_attend(row, stage.without)));
    }
    bar.text = format_duration(1e-6 * figure_at(row, "layer_us.p50")) + " a layer";
  }
  return out;
}

Bars tokens_of(const ordered_json& rows) {
  Bars out;
  out.unit = "us";
  out.parts = {"all attends of a token, median"};
  for (const ordered_json& row : rows) {
    if (row["token_us"].is_null()) continue;
    out.bars.push_back({row["name"],
                        {figure_at(row, "token_us.p50")},
                        format_duration(1e-6 * figure_at(row, "token_us.p50")) + ", " +
                            format_number(figure_at(row, "tokens_per_second")) + " tokens/s"});
  }
  return out;
}

PageTable table_of(const ordered_json& rows) {
  PageTable out;
  for (const char* title : kStepColumns) out.columns.push_back({title});
  out.columns.front().text = true;
  out.columns.push_back({"note", true});
  for (const ordered_json& row : rows) {
    const auto number = [&](const char* field) { return format_number(figure_at(row, field), 4); };
    const auto us = [&](const char* field) {
      const double value = figure_at(row, field);
      return std::isfinite(value) ? format_duration(1e-6 * value) : "-";
    };
    const double build = shown_build(figure_at(row, "build_s"), figure_at(row, "tail_build_s"));
    const double read = per_attend(row, "bytes_read");
    out.rows.push_back({row["name"], build == 0 ? "-" : format_duration(build), us("layer_us.p50"),
                        us("layer_us.p95"), us("layer_us.p99"), us("token_us.p50"),
                        us("token_us.p95"), number("tokens_per_second"),
                        std::isfinite(read) ? format_bytes(static_cast<uint64_t>(read)) : "-",
                        format_number(error_of(row, "p50"), 4),
                        format_number(error_of(row, "p95"), 4),
                        format_number(error_of(row, "p99"), 4), number("audit.recall"),
                        number("audit.mass.mean"), row["note"]});
  }
  return out;
}

}  // namespace

std::string bench_step_page(const ordered_json& document) {
  const ordered_json& options = document["options"];
  const ordered_json& rows = document["results"];
  Page page("keyhole bench-step: " + format_count(options["context"]) + " tokens");
  put_page_facts(page, document);
  page.fact("model", options["layers"].dump() + " layers, " + options["q_heads"].dump() +
                         " query and " + options["kv_heads"].dump() + " KV heads of " +
                         options["head_dim"].dump() + ", " +
                         options["kv_dtype"].get<std::string>());
  page.fact("data", options["data_description"]);
  page.fact("steps", options["steps"].dump() + " after " + options["warmup"].dump() + ", in " +
                         options["steps_in"].get<std::string>() + ", " + options["threads"].dump() +
                         " threads; sink " + options["sink"].dump() + ", window " +
                         options["window"].dump());
  if (const std::string ranks = ranks_of(options); !ranks.empty()) {
    page.fact("ranks", ranks + "; times of the slowest, sums of memory and of what is read");
  }
  if (const std::string device = document["floors"]["device"]; !device.empty()) {
    page.fact("device", device);
  }

  page.section("Time of a token");
  page.add(tokens_of(rows));
  const Bars stages = stages_of(rows);
  if (!stages.bars.empty()) {
    page.section("A step by stage",
                 "Worker time of one attend of one layer, summed over threads: where several work "
                 "at once, it is longer than the step.");
    page.add(stages);
  }
  const Curves curves = curves_of(rows);
  if (!curves.points.empty()) {
    page.section("What each way costs and is worth",
                 "Times of whole layers; errors of the same steps, computed again exactly.");
    page.add(curves);
  }
  page.section("Figures");
  page.add(table_of(rows));
  for (const ordered_json& warning : document["warnings"]) {
    page.paragraph("warning: " + warning.get<std::string>());
  }
  PageTable phases{{{"preparation", true}, {"time"}}, {}, {}};
  for (const auto& [name, seconds] : document["phases_s"].items()) {
    phases.rows.push_back({name, format_duration(seconds)});
  }
  if (!phases.rows.empty()) page.add(phases);
  put_page_command(page, document);
  return page.html(document);
}

std::string bench_step_svg(const ordered_json& document) {
  const ordered_json& options = document["options"];
  Curves curves = curves_of(document["results"]);
  if (curves.points.empty()) return "";
  curves.panels = {{kLayer, kError}, {kMemory, kError}};
  const std::string device = document["floors"]["device"], ranks = ranks_of(options);
  return curves_svg(
      curves,
      format_count(options["context"]) + " tokens, " + options["q_heads"].dump() + " query and " +
          options["kv_heads"].dump() + " KV heads of " + options["head_dim"].dump() + ", " +
          options["layers"].dump() + " layers; " + (ranks.empty() ? "" : "ranks: " + ranks + "; ") +
          (device.empty() ? "" : device + ", ") + document["machine"]["cpu"].get<std::string>(),
      2);
}

}  // namespace keyhole::tools

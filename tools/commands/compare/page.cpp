#include "tools/commands/compare/page.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <optional>

#include "runtime/files/json.h"
#include "tools/commands/common/head_grid.h"
#include "tools/commands/common/head_truth.h"
#include "tools/commands/common/page_facts.h"
#include "tools/commands/compare/bytes_text.h"
#include "tools/page/page.h"
#include "tools/terminal/units.h"

namespace keyhole::tools {
namespace {

using nlohmann::ordered_json;

constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();
/// The error that counts as good where the reader has not named one.
constexpr double kUsualError = 0.05;
/// Figures that a page carries for single heads at most: some 10 MB. A page of more shows the means alone.
constexpr size_t kMostFigures = 1000000;

// "topk:100, tail second:16, error=0.05".
std::string way_text(const ordered_json& row) {
  std::string text = row["attend"];
  if (row["tail"] != "none") text += ", tail " + row["tail"].get<std::string>();
  if (row["target"] != "none") text += ", " + row["target"].get<std::string>();
  return text;
}
std::string point_text(const ordered_json& row) {
  return row["index"].get<std::string>() + ", " + way_text(row);
}

// Rows of files, of which nobody knows what a step read.
bool is_of_file(const ordered_json& row) { return row["bytes_per_step"].is_null(); }

// The places of the quantities of the curves in kQuantities.
enum : size_t { kTime, kBytes, kMemory, kReadShare, kError, kRecall, kMass, kQuantityCount };

std::vector<Quantity> quantities(size_t recall_k) {
  std::vector<Quantity> out(kQuantityCount);
  out[kTime] = {"latency_us.p50", "median latency of a step of one KV head, us", Scale::log};
  out[kBytes] = {"bytes_per_step", "bytes read by a step of one KV head", Scale::log};
  out[kMemory] = {"memory_bytes_per_key", "memory beside K and V, bytes a key (from 1)", Scale::log,
                  1};
  out[kReadShare] = {"read_share", "read by a step, share of the offloaded keys and values",
                     Scale::log};
  // An exact scan's 1e-7 would press all other lines together.
  out[kError] = {"output_error_median", "output error, median (below 0.001 drawn there)",
                 Scale::log, 1e-3};
  out[kRecall] = {"recall", "recall@" + std::to_string(recall_k), Scale::linear, 0, true};
  out[kMass] = {"recovered_mass", "recovered mass (above 0.9999 drawn there)", Scale::nines, 1e-4,
                true};
  return out;
}

std::vector<double> figures_of(const ordered_json& row, const std::vector<Quantity>& all) {
  std::vector<double> out;
  for (const Quantity& q : all) out.push_back(figure_at(row, q.field));
  return out;
}

bool has_errors(const ordered_json& summary) {
  return std::any_of(summary.begin(), summary.end(),
                     [](const ordered_json& s) { return !s["output_error_median"].is_null(); });
}

std::string head_text(const ordered_json& row) {
  return "layer " + row["layer"].dump() + ", KV head " + row["kv_head"].dump();
}

Curves curves_of(const ordered_json& document, bool with_heads) {
  const ordered_json& summary = document["summary"];
  Curves out;
  out.quantities = quantities(document["options"]["k"]);
  std::map<std::string, size_t> places;
  Curves::View& means = out.views.emplace_back();
  means.name = "means over all heads, weighted by their mass";
  for (const ordered_json& row : summary) {
    places.emplace(point_text(row), out.points.size());
    out.points.push_back({out.series_of(row["series"], way_text(row)), point_text(row)});
    means.values.push_back(figures_of(row, out.quantities));
  }
  const ordered_json& rows = document["results"];
  if (!with_heads || rows.size() * out.quantities.size() > kMostFigures) return out;
  std::map<std::string, size_t> heads;
  for (const ordered_json& row : rows) {
    const std::string name = head_text(row);
    const auto [at, is_new] = heads.emplace(name, out.views.size());
    if (is_new) {
      out.views.push_back(
          {name,
           std::vector(out.points.size(), std::vector<double>(out.quantities.size(), kUnknown))});
    }
    out.views[at->second].values[places.at(point_text(row))] = figures_of(row, out.quantities);
  }
  if (heads.size() < 2) out.views.resize(1);  // the means are those of the only head
  return out;
}

std::vector<HeatMap> heat_maps(const ordered_json& document) {
  const ordered_json& rows = document["results"];
  const HeadGrid grid(rows);
  std::vector<HeatMap> out = {
      grid.map_of(rows, "attention mass in the middle (offloaded)", "middle_mass", Scale::linear),
      grid.map_of(
          rows,
          "sparsity: tokens not among those for " + format_number(100 * kUsualCoverage) + " %",
          "sparsity", Scale::nines, 1e-6)};
  if (!has_errors(document["summary"])) return out;
  double bound = kUsualError;
  if (!document["advice"].is_null()) {
    for (const ordered_json& goal : document["advice"]["goals"]) {
      if (goal["of"] == "error") bound = goal["most"];
    }
  }
  // The fastest row of each head that keeps the error.
  std::vector<const ordered_json*> best(grid.cells(), nullptr);
  for (const ordered_json& row : rows) {
    if (is_of_file(row)) continue;  // its time may be another machine's
    if (row["output_error_median"].is_null() || row["output_error_median"] > bound) continue;
    const ordered_json*& held = best[grid.cell(row)];
    if (held == nullptr || row["latency_us"]["p50"] < (*held)["latency_us"]["p50"]) held = &row;
  }
  const std::string good = "error of at most " + format_number(bound);
  HeatMap chosen = grid.map("fastest with an " + good, "index", Scale::linear);
  HeatMap time = grid.map("its median latency, us", "latency_us.p50", Scale::log);
  HeatMap error =
      grid.map("its output error, median (from 0.0001)", "output_error_median", Scale::log, 1e-4);
  for (size_t cell = 0; cell < best.size(); ++cell) {
    if (best[cell] == nullptr) continue;
    chosen.set_name(cell, point_text(*best[cell]));
    time.values[cell] = figure_at(*best[cell], time.field);
    error.values[cell] = figure_at(*best[cell], error.field);
  }
  if (!chosen.names.empty()) out.insert(out.end(), {chosen, time, error});
  return out;
}

PageTable table_of(const ordered_json& summary) {
  PageTable out;
  out.columns = {{"index", true}, {"attend", true}, {"tail", true}, {"target", true},
                 {"front", true}, {"error p50"},    {"error p95"},  {"read"},
                 {"read/step"},   {"p50 us"},       {"p95 us"},     {"p99 us"},
                 {"recall"},      {"mass"},         {"missing"},    {"estimated"},
                 {"scan"},        {"attended"},     {"build"},      {"bytes/key"}};
  for (const ordered_json& row : summary) {
    const auto text = [&](const char* field) { return row[field].get<std::string>(); };
    const auto number = [&](const char* field, int digits = 3) {
      return format_number(figure_at(row, field), digits);
    };
    const auto percent = [&](const char* field) {
      const double share = figure_at(row, field);
      return std::isnan(share) ? "-" : format_number(100 * share) + " %";
    };
    std::string fronts;
    for (const ordered_json& name : row["pareto"]) {
      fronts += (fronts.empty() ? "" : ", ") + name.get<std::string>();
    }
    out.rows.push_back({text("index"),
                        text("attend"),
                        text("tail"),
                        text("target"),
                        fronts,
                        number("output_error_median"),
                        number("output_error_p95"),
                        percent("read_share"),
                        bytes_text(figure_at(row, "bytes_per_step")),
                        number("latency_us.p50", 4),
                        number("latency_us.p95", 4),
                        number("latency_us.p99", 4),
                        number("recall", 4),
                        number("recovered_mass", 5),
                        number("missing_mass"),
                        number("estimated_missing_mass"),
                        percent("scan_fraction"),
                        number("keys_attended"),
                        format_duration(figure_at(row, "build_s_total")),
                        number("memory_bytes_per_key")});
    out.marked.push_back(!fronts.empty());
  }
  return out;
}

std::string trace_text(const ordered_json& document) {
  const ordered_json& trace = document["trace"];
  const ordered_json& options = document["options"];
  return trace["path"].get<std::string>() + ": " + format_count(trace["tokens"]) + " tokens, " +
         format_count(options["offloaded"]) + " of them offloaded (sink " + options["sink"].dump() +
         ", window " + options["window"].dump() + "); " + trace["q_heads"].dump() + " query and " +
         trace["kv_heads"].dump() + " KV heads of " + trace["head_dim"].dump() + "; " +
         options["queries"].dump() + " queries; K and V in " +
         options["kv_dtype"].get<std::string>();
}

}  // namespace

std::string compare_page(const ordered_json& document) {
  const ordered_json& summary = document["summary"];
  Page page("keyhole compare: " + document["trace"]["path"].get<std::string>());
  put_page_facts(page, document);
  page.fact("trace", trace_text(document));
  if (const std::string model = document["trace"]["model"]; !model.empty()) {
    page.fact("model", model + ", task " + document["trace"]["task"].get<std::string>());
  }

  if (!document["advice"].is_null()) {
    page.section("Advice");
    page.verbatim(document["advice"]["text"]);
  }

  page.section(
      "What each way costs and is worth",
      "One step of one KV head: its search and its attention, on one thread. Points are "
      "the specs of a sweep. Down and to the left is better for errors, up and to the left "
      "for recall and mass.");
  Curves curves = curves_of(document, true);
  std::vector<size_t> worths;
  if (has_errors(summary)) worths.push_back(kError);
  worths.insert(worths.end(), {kRecall, kMass});
  for (const size_t worth : worths) {
    for (const size_t cost : {kTime, kBytes, kMemory}) curves.panels.emplace_back(cost, worth);
  }
  page.add(curves);

  page.section("Heads");
  page.add(heat_maps(document));

  page.section(
      "Figures",
      "Means over heads, weighted by the attention mass of their offloaded tokens. "
      "Rows with a front are beaten by no other in that cost and in output error (recall, "
      "where the trace has no values)." +
          std::string(std::any_of(summary.begin(), summary.end(), is_of_file)
                          ? " Rows without a read are results of files: their times, builds "
                            "and memory are of whatever machine they were taken on."
                          : ""));
  page.add(table_of(summary));
  put_page_command(page, document);
  return page.html(document);
}

std::string compare_svg(const ordered_json& document) {
  Curves curves = curves_of(document, false);
  const size_t worth = has_errors(document["summary"]) ? kError : kRecall;
  curves.panels = {{kReadShare, worth}, {kTime, worth}};
  return curves_svg(
      curves,
      document["trace"]["path"].get<std::string>() + ": " +
          format_count(document["options"]["offloaded"]) + " offloaded keys, means over " +
          document["summary"].front()["heads"].dump() + " heads weighted by their mass; " +
          document["machine"]["cpu"].get<std::string>(),
      2);
}

}  // namespace keyhole::tools

#include "tools/commands/calibrate/page.h"

#include "runtime/files/json.h"
#include "tools/commands/common/head_grid.h"
#include "tools/commands/common/page_facts.h"
#include "tools/page/page.h"
#include "tools/terminal/command_line.h"
#include "tools/terminal/units.h"

namespace keyhole::tools {
namespace {

using nlohmann::ordered_json;

ordered_json document_of(const char* format, const Requirement& requirement, const Machine& machine,
                         ordered_json heads) {
  return {{"format", format},
          {"version", 1},
          {"command", command_line()},
          {"machine", to_json(machine)},
          {"requirement",
           {{"error", requirement.error},
            {"quantile", requirement.quantile},
            {"factor", requirement.factor},
            {"text", requirement.text()}}},
          {"heads", std::move(heads)}};
}

std::string choice_text(const ordered_json& row) {
  if (row["dense"]) return "exact";
  return row["index"].get<std::string>() + ", " + row["budget"].get<std::string>();
}

double sum_of(const ordered_json& rows, const char* field) {
  double sum = 0;
  for (const ordered_json& row : rows) sum += figure_at(row, field);
  return sum;
}

std::string held_text(const ordered_json& row) {
  if (row.contains("met") && !row["met"]) return "not met";
  return row["held"] ? "yes" : "no";
}

void put_sums(Page& page, const ordered_json& rows) {
  const double us = sum_of(rows, "us");
  Bars bars;
  bars.unit = us > 0 ? "us" : "bytes";
  bars.parts = {us > 0 ? "time of one thread" : "bytes read"};
  const auto add = [&](const char* name, const char* time, const char* bytes) {
    const auto read = static_cast<uint64_t>(sum_of(rows, bytes));
    bars.bars.push_back(
        {name,
         {us > 0 ? sum_of(rows, time) : static_cast<double>(read)},
         (us > 0 ? format_duration(1e-6 * sum_of(rows, time)) + ", " : "") + format_bytes(read)});
  };
  add("exact attention", "dense_us", "dense_bytes");
  add("what was chosen", "us", "bytes");
  page.section("A step of all heads");
  page.add(bars);
}

void put_heads(Page& page, const ordered_json& rows) {
  put_sums(page, rows);
  page.section("Heads", "Errors are those of queries that had no part in the choice.");
  const HeadGrid grid(rows);
  page.add(std::vector{
      grid.map_of(rows, "attention mass in the middle", "middle_mass", Scale::linear),
      grid.names_of(rows, "chosen", "index", choice_text),
      grid.map_of(rows, "output error, median (from 0.0001)", "error_median", Scale::log, 1e-4),
      grid.map_of(rows, "bytes read, share of exact attention", "read_share", Scale::log, 1e-4),
      grid.map_of(rows, "keys attended by a step (from 1)", "attended", Scale::log, 1),
      grid.names_of(rows, "requirement held", "held", held_text)});
  page.section("Figures");
  PageTable table;
  table.columns = {{"layer"},     {"KV head"},   {"mass"},        {"index and budget", true},
                   {"median"},    {"p95"},       {"held", true},  {"attended"},
                   {"read/step"}, {"time/step"}, {"exact reads"}, {"exact takes"},
                   {"index size"}};
  for (const ordered_json& row : rows) {
    const auto number = [&](const char* field) { return format_number(figure_at(row, field)); };
    const auto bytes = [&](const char* field) {
      return format_bytes(static_cast<uint64_t>(figure_at(row, field)));
    };
    const auto time = [&](const char* field) {
      const double us = figure_at(row, field);
      return us > 0 ? format_duration(1e-6 * us) : "-";
    };
    table.rows.push_back({row["layer"].dump(), row["kv_head"].dump(), number("middle_mass"),
                          choice_text(row), number("error_median"), number("error_p95"),
                          held_text(row), number("attended"), bytes("bytes"), time("us"),
                          bytes("dense_bytes"), time("dense_us"), bytes("held_bytes")});
  }
  page.add(table);
}

void put_patterns(Page& page, const ordered_json& rows) {
  page.section("Query heads", "Errors are those of tiles that had no part in the choice.");
  const HeadGrid grid(rows, "q_head");
  page.add(std::vector{
      grid.names_of(rows, "pattern", "pattern",
                    [](const ordered_json& row) { return row["pattern"].get<std::string>(); }),
      grid.map_of(rows, "share of the blocks", "share", Scale::log, 1e-4),
      grid.map_of(rows, "recovered attention", "mass", Scale::nines, 1e-4),
      grid.map_of(rows, "error, median (from 0.0001)", "error_median", Scale::log, 1e-4),
      grid.names_of(rows, "requirement held", "held", held_text)});
  page.section("Figures");
  PageTable table;
  table.columns = {{"layer"},  {"query head"}, {"pattern", true}, {"blocks"}, {"mass"},
                   {"median"}, {"p95"},        {"held", true},    {"time"},   {"dense"}};
  for (const ordered_json& row : rows) {
    const auto number = [&](const char* field) { return format_number(figure_at(row, field)); };
    table.rows.push_back({row["layer"].dump(), row["q_head"].dump(), row["pattern"],
                          format_number(100 * figure_at(row, "share")) + " %", number("mass"),
                          number("error_median"), number("error_p95"), held_text(row),
                          format_duration(figure_at(row, "seconds")),
                          format_duration(figure_at(row, "dense_seconds"))});
  }
  page.add(table);
}

}  // namespace

ordered_json calibration_document(const std::vector<HeadChoice>& choices,
                                  const CalibrationPlan& plan, const Machine& machine) {
  ordered_json heads = ordered_json::array();
  for (const HeadChoice& c : choices) {
    heads.push_back({{"layer", c.layer},
                     {"kv_head", c.kv_head},
                     {"middle_mass", c.middle_mass},
                     {"dense", c.dense},
                     {"index", c.dense ? "exact" : c.index},
                     {"budget", c.dense ? "-" : c.budget.text()},
                     {"error_median", c.error_median},
                     {"error_p95", c.error_p95},
                     {"met", c.met()},
                     {"held", c.held()},
                     {"attended", c.attended},
                     {"bytes", c.bytes},
                     {"us", c.us},
                     {"dense_bytes", c.dense_bytes},
                     {"dense_us", c.dense_us},
                     {"read_share", c.bytes / c.dense_bytes},
                     {"held_bytes", c.held_bytes}});
  }
  return document_of("keyhole-calibration", plan.requirement, machine, std::move(heads));
}

ordered_json calibration_document(const std::vector<PatternChoice>& choices,
                                  const PrefillPlan& plan, const Machine& machine) {
  ordered_json heads = ordered_json::array();
  for (const PatternChoice& c : choices) {
    heads.push_back({{"layer", c.layer},
                     {"q_head", c.q_head},
                     {"pattern", c.figures.pattern},
                     {"share", c.figures.share},
                     {"mass", c.figures.mass},
                     {"error_median", c.figures.error_median},
                     {"error_p95", c.figures.error_p95},
                     {"held", c.figures.held()},
                     {"seconds", c.figures.seconds},
                     {"dense_seconds", c.dense.seconds}});
  }
  return document_of("keyhole-pattern-calibration", plan.requirement, machine, std::move(heads));
}

std::string calibration_page(const ordered_json& document) {
  const bool patterns = document["format"] == "keyhole-pattern-calibration";
  Page page(patterns ? "keyhole calibrate --prefill" : "keyhole calibrate");
  put_page_facts(page, document);
  page.fact("required", document["requirement"]["text"]);
  patterns ? put_patterns(page, document["heads"]) : put_heads(page, document["heads"]);
  put_page_command(page, document);
  return page.html(document);
}

}  // namespace keyhole::tools

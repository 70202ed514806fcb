#include "tools/commands/eval/ruler_page.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "runtime/files/json.h"
#include "tools/commands/common/page_facts.h"
#include "tools/commands/eval/page.h"
#include "tools/page/page.h"
#include "tools/terminal/units.h"

namespace keyhole::tools {
namespace {

using nlohmann::ordered_json;

/// The ways of the results, in their order.
std::vector<std::string> ways_of(const ordered_json& means) {
  std::vector<std::string> ways;
  for (const ordered_json& row : means) {
    const std::string way = way_text(row);
    if (std::find(ways.begin(), ways.end(), way) == ways.end()) ways.push_back(way);
  }
  return ways;
}

Bars mean_bars(const ordered_json& means) {
  Bars out;
  out.parts = {"mean score of all tasks, %"};
  out.unit = "%";
  out.full = 100;
  for (const ordered_json& row : means) {
    const double score = row["score"];
    out.bars.push_back({way_text(row) + " at " + format_count(row["length"]),
                        {score},
                        format_number(score, 4) + " %"});
  }
  return out;
}

/// Scores as papers print them: a task in each row, and for each way and length a column.
PageTable score_table(const ordered_json& document) {
  const ordered_json& means = document["means"];
  PageTable table;
  table.columns = {{"score, %", true}};
  std::vector<std::string> columns;
  for (const std::string& way : ways_of(means)) {
    for (const ordered_json& length : document["lengths"]) {
      columns.push_back(way + " at " + format_count(length));
      table.columns.push_back({columns.back()});
    }
  }
  const auto add = [&](const std::string& task, const ordered_json& rows) {
    std::vector<std::string> cells(1 + columns.size(), "-");
    cells.front() = task;
    for (const ordered_json& row : rows) {
      if (row["task"] != task) continue;
      const std::string column = way_text(row) + " at " + format_count(row["length"]);
      const auto found = std::find(columns.begin(), columns.end(), column);
      cells.at(1 + static_cast<size_t>(found - columns.begin())) =
          format_number(row["score"].get<double>(), 4);
    }
    table.rows.push_back(std::move(cells));
  };
  for (const ordered_json& task : document["ruler"]) add(task, document["results"]);
  add("mean", means);
  return table;
}

Curves length_curves(const ordered_json& means) {
  Curves out;
  out.group_title = "Way";
  out.quantities = {{"length", "tokens", Scale::log},
                    {"score", "mean score of all tasks, %", Scale::linear, 0, true},
                    {"attention_ms_per_token", "attention of a token, ms", Scale::log}};
  out.panels = {{0, 1}, {0, 2}};
  Curves::View& view = out.views.emplace_back();
  view.name = "all";
  for (const ordered_json& row : means) {
    const std::string way = way_text(row);
    out.points.push_back({out.series_of(way, ""), way + " at " + format_count(row["length"])});
    std::vector<double>& values = view.values.emplace_back();
    for (const Quantity& q : out.quantities) values.push_back(figure_at(row, q.field));
  }
  return out;
}

/// Scores of each question of a task whose samples have several.
PageTable question_table(const ordered_json& rows, const std::string& task) {
  PageTable table;
  table.columns = {{task, true}};
  for (const ordered_json& row : rows) {
    if (row["task"] != task) continue;
    std::vector<std::string> cells = {way_text(row) + " at " + format_count(row["length"])};
    for (const ordered_json& question : row["questions"]) {
      cells.push_back(format_number(question["score"].get<double>(), 4));
    }
    while (table.columns.size() < cells.size()) {
      table.columns.push_back({std::to_string(table.columns.size())});
    }
    table.rows.push_back(std::move(cells));
  }
  return table;
}

/// The tasks whose samples have several questions.
std::vector<std::string> tasks_of_turns(const ordered_json& rows) {
  std::vector<std::string> tasks;
  for (const ordered_json& row : rows) {
    const std::string task = row["task"];
    const bool known = std::find(tasks.begin(), tasks.end(), task) != tasks.end();
    if (row.contains("questions") && !known) tasks.push_back(task);
  }
  return tasks;
}

void add_score_rows(const ordered_json& rows, PageTable& table) {
  for (const ordered_json& row : rows) {
    const auto bytes = [&](const char* field) {
      const double value = figure_at(row, field);
      return std::isfinite(value) ? format_bytes(static_cast<uint64_t>(value)) : "-";
    };
    const double attention = figure_at(row, "attention_ms_per_token");
    const bool swaps = row["lost"].is_number();
    table.rows.push_back({format_count(row["length"]), row["task"], way_text(row),
                          format_number(row["score"].get<double>(), 4),
                          swaps ? row["lost"].dump() + " / " + row["won"].dump() : "-",
                          bytes("bytes_read_per_token"),
                          format_number(figure_at(row, "tokens_per_second")),
                          std::isfinite(attention) ? format_duration(1e-3 * attention) : "-",
                          format_duration(figure_at(row, "build_s")), bytes("index_bytes")});
  }
}

}  // namespace

std::string ruler_page(const ordered_json& document) {
  const ordered_json& means = document["means"];
  Page page("keyhole eval: ruler, " + document["samples"].dump() +
            (document["samples"] == 1 ? " sample" : " samples") + " of each task and length");
  put_eval_facts(page, document);
  page.section("Scores", document["note"]);
  page.add(mean_bars(means));
  page.add(score_table(document));
  if (document["lengths"].size() > 1) {
    page.section("By length");
    page.add(length_curves(means));
  }
  const std::vector<std::string> turns = tasks_of_turns(document["results"]);
  if (!turns.empty()) {
    page.section("By question",
                 "Mean scores, %, of the questions that come one after the other in a session.");
    for (const std::string& task : turns) page.add(question_table(document["results"], task));
  }
  page.section("Figures",
               "lost / won: samples with a lower score than with exact attention of this run / "
               "with a higher one.");
  PageTable table;
  table.columns = {{"length"},     {"task", true}, {"way", true}, {"score, %"},
                   {"lost / won"}, {"read/token"}, {"tokens/s"},  {"attention/token"},
                   {"build"},      {"index size"}};
  add_score_rows(document["results"], table);
  add_score_rows(means, table);
  page.add(table);
  put_page_command(page, document);
  return page.html(document);
}

}  // namespace keyhole::tools

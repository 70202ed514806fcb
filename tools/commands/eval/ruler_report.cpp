#include "tools/commands/eval/ruler_report.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <utility>

#include "runtime/files/json.h"
#include "tools/commands/common/prompt_text.h"
#include "tools/terminal/table.h"
#include "tools/terminal/units.h"

namespace keyhole::tools {
namespace {

using nlohmann::ordered_json;

const RulerRow* exact_of(const RulerGroup& group) {
  const auto found = std::find_if(group.rows.begin(), group.rows.end(),
                                  [](const RulerRow& row) { return row.runs.front().is_exact(); });
  return found == group.rows.end() ? nullptr : &*found;
}

void add_ruler_rows(const RulerGroup& group, Table& table) {
  const RulerRow* exact = exact_of(group);
  for (const RulerRow& row : group.rows) {
    const EvalWay way = mean_way(row.runs);
    std::vector<std::string> cells = {group.task};
    for (std::string& cell : way_cells(way)) cells.push_back(std::move(cell));
    cells.push_back(format_number(row.percent(), 4) + " %");
    cells.push_back(swaps_cell(score_swaps(row, exact == &row ? nullptr : exact)));
    for (std::string& cell : cost_cells(way)) cells.push_back(std::move(cell));
    table.add_row(std::move(cells));
  }
}

ordered_json wrong_json(const RulerGroup& group, const RulerRow& row) {
  ordered_json wrong = ordered_json::array();
  for (size_t i = 0; i < row.answers.size(); ++i) {
    const RulerAnswer& answer = row.answers[i];
    if (answer.score == 1.0) continue;
    ordered_json& entry = wrong.emplace_back();
    entry["sample"] = i / group.turns;
    if (group.turns > 1) entry["question"] = i % group.turns + 1;
    entry["references"] = group.references[i];
    entry["answer"] = printable(answer.prediction);
    entry["score"] = answer.score;
  }
  return wrong;
}

/// Scores of each question, where a sample has several; empty otherwise.
std::string turns_text(const RulerGroup& group) {
  if (group.turns == 1) return "";
  std::vector<Table::Column> columns = {{group.task + ", score of question", Table::Align::left}};
  for (size_t t = 0; t < group.turns; ++t) columns.push_back({std::to_string(t + 1)});
  Table table(columns);
  for (const RulerRow& row : group.rows) {
    std::vector<std::string> cells = {mean_way(row.runs).name()};
    for (const TurnMean& turn : turn_means(group, row)) {
      cells.push_back(format_number(turn.percent));
    }
    table.add_row(std::move(cells));
  }
  return "length " + format_count(group.length) + "\n" + table.text(style_of(stdout)) + "\n";
}

}  // namespace

EvalWay mean_way(const std::vector<EvalWay>& runs) {
  EvalWay mean = runs.front();
  const auto mean_over = [&runs](double EvalWay::*figure) {
    double sum = 0.0;
    size_t known = 0;
    for (const EvalWay& run : runs) {
      if (std::isnan(run.*figure)) continue;
      sum += run.*figure;
      ++known;
    }
    return known == 0 ? std::nan("") : sum / static_cast<double>(known);
  };
  for (double EvalWay::*figure :
       {&EvalWay::build_seconds, &EvalWay::index_bytes, &EvalWay::scan_fraction,
        &EvalWay::keys_attended, &EvalWay::bytes_read}) {
    mean.*figure = mean_over(figure);
  }
  mean.times = {};
  uint64_t format_bytes = 0;
  double numbers = 0.0;  // of K and V of all prompts
  for (const EvalWay& run : runs) {
    mean.times.steps += run.times.steps;
    mean.times.attention += run.times.attention;
    mean.times.projections += run.times.projections;
    mean.times.mlp += run.times.mlp;
    mean.times.logits += run.times.logits;
    format_bytes += run.format_bytes;
    if (run.format_bytes != 0) {
      numbers += 8.0 * static_cast<double>(run.format_bytes) / run.format_bits_in_all;
    }
  }
  mean.format_bytes = format_bytes / runs.size();
  if (numbers > 0.0) {
    mean.format_bits_in_all = 8.0 * static_cast<double>(format_bytes) / numbers;
  }
  return mean;
}

std::vector<TurnMean> turn_means(const RulerGroup& group, const RulerRow& row) {
  std::vector<TurnMean> means(group.turns);
  const double samples = static_cast<double>(row.answers.size()) / static_cast<double>(group.turns);
  for (size_t i = 0; i < row.answers.size(); ++i) {
    TurnMean& mean = means[i % group.turns];
    mean.percent += 100.0 * row.answers[i].score / samples;
    mean.taken += static_cast<double>(row.answers[i].taken) / samples;
  }
  return means;
}

std::optional<Swaps> score_swaps(const RulerRow& row, const RulerRow* exact) {
  if (exact == nullptr) return std::nullopt;
  Swaps swaps;
  for (size_t i = 0; i < row.scores.size(); ++i) {
    swaps.lost += static_cast<size_t>(row.scores[i] < exact->scores[i]);
    swaps.won += static_cast<size_t>(row.scores[i] > exact->scores[i]);
  }
  return swaps;
}

std::vector<RulerGroup> mean_groups(const std::vector<RulerGroup>& groups) {
  std::vector<RulerGroup> means;
  for (const RulerGroup& group : groups) {
    if (means.empty() || means.back().length != group.length) {
      means.push_back({group.length, "mean", 0, {}, {}, 1});
      means.back().rows.resize(group.rows.size());
    }
    for (size_t i = 0; i < group.rows.size(); ++i) {
      RulerRow& mean = means.back().rows[i];
      const RulerRow& row = group.rows[i];
      mean.runs.insert(mean.runs.end(), row.runs.begin(), row.runs.end());
      mean.scores.insert(mean.scores.end(), row.scores.begin(), row.scores.end());
    }
  }
  return means;
}

std::string ruler_text(const std::vector<RulerGroup>& groups) {
  std::string text;
  for (const RulerGroup& mean : mean_groups(groups)) {
    std::vector<Table::Column> columns = way_columns({{"score"}, {"lost / won"}});
    columns.insert(columns.begin(), {"task", Table::Align::left});
    Table table(std::move(columns));
    for (const RulerGroup& group : groups) {
      if (group.length == mean.length) add_ruler_rows(group, table);
    }
    add_ruler_rows(mean, table);
    text += "length " + format_count(mean.length) + "\n" + table.text(style_of(stdout)) + "\n";
  }
  for (const RulerGroup& group : groups) text += turns_text(group);
  const std::vector<RulerGroup> means = mean_groups(groups);
  for (const RulerRow& row : means.back().rows) text += emulation_text(mean_way(row.runs));
  if (exact_of(means.back()) != nullptr) {
    text +=
        "lost / won: samples with a lower score than with exact attention of this run / with a "
        "higher one\n";
  }
  return text;
}

ordered_json ruler_json(const std::vector<RulerGroup>& groups) {
  ordered_json rows = ordered_json::array();
  for (const RulerGroup& group : groups) {
    const RulerRow* exact = exact_of(group);
    for (const RulerRow& row : group.rows) {
      const std::optional<Swaps> swaps = score_swaps(row, exact);
      ordered_json result = {{"length", group.length},
                             {"task", group.task},
                             {"score", row.percent()},
                             {"samples", row.scores.size()},
                             {"lost", swaps ? ordered_json(swaps->lost) : ordered_json(nullptr)},
                             {"won", swaps ? ordered_json(swaps->won) : ordered_json(nullptr)}};
      if (!group.references.empty()) {
        result["units"] = group.units;
        for (const TurnMean& turn : turn_means(group, row)) {
          if (group.turns == 1) break;
          result["questions"].push_back({{"score", turn.percent}, {"taken", turn.taken}});
        }
        result["wrong"] = wrong_json(group, row);
      }
      rows.push_back(way_json(mean_way(row.runs), result));
    }
  }
  return rows;
}

}  // namespace keyhole::tools

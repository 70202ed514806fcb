#include "tools/commands/eval/page.h"

#include <cmath>
#include <utility>

#include "runtime/files/json.h"
#include "tools/commands/common/page_facts.h"
#include "tools/commands/eval/draft_page.h"
#include "tools/commands/eval/ruler_page.h"
#include "tools/page/page.h"
#include "tools/terminal/units.h"

namespace keyhole::tools {
namespace {

using nlohmann::ordered_json;

std::string text_of(const ordered_json& row, const char* field) {
  return row[field].is_string() ? row[field].get<std::string>() : "";
}

std::string index_text(const ordered_json& row) {
  const std::string budgets = text_of(row, "budgets");
  return budgets.empty() ? text_of(row, "index") : "budgets of " + budgets;
}

std::string budget_text(const ordered_json& row) {
  std::string text = text_of(row, "attend");
  if (const std::string tail = text_of(row, "tail"); !tail.empty() && tail != "none") {
    text += ", tail " + tail;
  }
  if (const std::string target = text_of(row, "target"); !target.empty() && target != "none") {
    text += ", " + target;
  }
  // Of a cache of another system, of which nothing is chosen.
  if (const double bits = figure_at(row, "kv_format.bits_in_all"); std::isfinite(bits)) {
    text = format_number(bits) + " bits a number";
  }
  return text.empty() ? "-" : text;
}

}  // namespace

std::string way_text(const ordered_json& row) {
  const std::string budget = budget_text(row);
  return index_text(row) + (budget == "-" ? "" : ", " + budget);
}

namespace {

/// The figure by which a task's answers are judged.
struct Worth {
  Quantity quantity;
  std::string title;
};
Worth worth_of(const ordered_json& row, bool from_base) {
  if (row.contains("accuracy")) {
    return {{"accuracy", "share of right answers", Scale::linear, 0, true}, "Right answers"};
  }
  if (row.contains("share_right")) {
    return {{"share_right", "share of bytes copied right", Scale::linear, 0, true},
            "Bytes copied right"};
  }
  if (row.contains("kld") && from_base) {
    return {{"kld.mean", "mean divergence of a token from the file's, nats", Scale::log, 1e-7},
            "Divergence from a file of llama.cpp"};
  }
  if (row.contains("kld")) {
    return {{"kld.mean", "mean divergence of a token from exact attention, nats", Scale::log, 1e-7},
            "Divergence from exact attention"};
  }
  const bool bytes = row.contains("bits_per_byte");
  return {{bytes ? "bits_per_byte" : "bits_per_token",
           bytes ? "bits per byte of the text" : "bits per token of the text", Scale::linear},
          "How well the text is predicted"};
}

Curves curves_of(const ordered_json& rows, const Quantity& worth) {
  Curves out;
  out.quantities = {
      worth,
      {"attention_ms_per_token", "attention of a token, ms", Scale::log},
      {"bytes_read_per_token", "bytes of host memory read for a token (from 1)", Scale::log, 1},
      {"index_bytes", "memory of the indexes, bytes (from 1)", Scale::log, 1}};
  out.panels = {{1, 0}, {2, 0}, {3, 0}};
  Curves::View& view = out.views.emplace_back();
  view.name = "all";
  for (const ordered_json& row : rows) {
    out.points.push_back({out.series_of(index_text(row), budget_text(row)), way_text(row)});
    std::vector<double>& values = view.values.emplace_back();
    for (const Quantity& q : out.quantities) values.push_back(figure_at(row, q.field));
  }
  return out;
}

Bars answers_of(const ordered_json& rows, const Quantity& worth) {
  Bars out;
  out.parts = {worth.label};
  if (worth.more_is_better) out.full = 1;
  for (const ordered_json& row : rows) {
    const double value = figure_at(row, worth.field);
    std::string text = format_number(value, 4);
    if (worth.field == "accuracy") text = row["correct"].dump() + "/" + row["questions"].dump();
    if (worth.field == "share_right") text = format_number(100 * value, 4) + " %";
    if (const double rate = figure_at(row, "tokens_per_second"); std::isfinite(rate)) {
      text += ", " + format_number(rate) + " tokens/s";
    }
    out.bars.push_back({way_text(row), {value}, text});
  }
  return out;
}

PageTable table_of(const ordered_json& rows, const Quantity& worth) {
  PageTable out;
  const bool diverges = worth.field == "kld.mean";
  out.columns = {{"index", true}, {"attend", true}, {worth.field}, {"lost / won"},
                 {"scanned"},     {"read/token"},   {"tokens/s"},  {"attention/token"},
                 {"build"},       {"index size"}};
  if (diverges) out.columns[3] = {"p50 / p99 / p99.9 / largest"};
  for (const ordered_json& row : rows) {
    const auto bytes = [&](const char* field) {
      const double value = figure_at(row, field);
      return std::isfinite(value) ? format_bytes(static_cast<uint64_t>(value)) : "-";
    };
    const double scanned = figure_at(row, "scan_fraction");
    const double attention = figure_at(row, "attention_ms_per_token");
    const bool swaps = row.contains("lost") && row["lost"].is_number();
    std::string beside = swaps ? row["lost"].dump() + " / " + row["won"].dump() : "-";
    if (diverges) {
      beside = "";
      for (const char* field : {"kld.p50", "kld.p99", "kld.p99_9", "kld.largest"}) {
        beside += (beside.empty() ? "" : " / ") + format_number(figure_at(row, field));
      }
    }
    out.rows.push_back(
        {index_text(row), budget_text(row), format_number(figure_at(row, worth.field), 5), beside,
         std::isfinite(scanned) ? format_number(100 * scanned) + " %" : "-",
         bytes("bytes_read_per_token"), format_number(figure_at(row, "tokens_per_second")),
         std::isfinite(attention) ? format_duration(1e-3 * attention) : "-",
         format_duration(figure_at(row, "build_s")), bytes("index_bytes")});
  }
  return out;
}

/// Divergence over the position, by way: of parts of the text (`--bins`).
Curves position_curves(const ordered_json& rows) {
  Curves out;
  out.quantities = {{"middle", "tokens decoded before, middle of a part", Scale::linear},
                    {"kld.mean", "mean divergence from exact attention, nats", Scale::log, 1e-7},
                    {"kld.p99_9", "the last per mille of it, nats", Scale::log, 1e-7},
                    {"same_best", "share of tokens whose likeliest successor is the same",
                     Scale::linear, 0, true}};
  out.panels = {{0, 1}, {0, 2}, {0, 3}};
  Curves::View& view = out.views.emplace_back();
  view.name = "all";
  for (const ordered_json& row : rows) {
    if (figure_at(row, "kld.largest") == 0) continue;  // exact attention
    for (const ordered_json& bin : row["bins"]) {
      out.points.push_back(
          {out.series_of(index_text(row), budget_text(row)),
           way_text(row) + ", " + format_count(bin["begin"]) + " to " + format_count(bin["end"])});
      std::vector<double>& values = view.values.emplace_back();
      for (const Quantity& q : out.quantities) values.push_back(figure_at(bin, q.field));
      values.front() = 0.5 * (bin["begin"].get<double>() + bin["end"].get<double>());
    }
  }
  return out;
}

PageTable position_table(const ordered_json& rows) {
  PageTable table;
  table.columns = {{"way", true},   {"tokens decoded before"},
                   {"divergence"},  {"p50"},
                   {"p99"},         {"p99.9"},
                   {"largest"},     {"same best"},
                   {"output error"}};
  for (const ordered_json& row : rows) {
    for (const ordered_json& bin : row["bins"]) {
      std::vector<std::string> cells = {
          way_text(row), format_count(bin["begin"]) + " to " + format_count(bin["end"])};
      for (const char* field : {"kld.mean", "kld.p50", "kld.p99", "kld.p99_9", "kld.largest"}) {
        cells.push_back(format_number(figure_at(bin, field)));
      }
      cells.push_back(format_number(100 * figure_at(bin, "same_best"), 4) + " %");
      const double error = figure_at(bin, "output_error");
      cells.push_back(std::isfinite(error) ? format_number(error) : "-");
      table.rows.push_back(std::move(cells));
    }
  }
  return table;
}

}  // namespace

void put_eval_facts(Page& page, const ordered_json& document) {
  put_page_facts(page, document);
  page.fact("model", document["model"].get<std::string>() + " on " +
                         document["device"].get<std::string>() + ", sink and window on " +
                         document["session_device"].get<std::string>());
  page.fact("cache", "sink " + document["sink"].dump() + ", window " + document["window"].dump() +
                         ", K and V in " + document["kv_dtype"].get<std::string>() +
                         ", offloaded in " + document["kv_host"].get<std::string>() + "; " +
                         document["threads"].dump() + " threads");
  page.fact("prompt", format_duration(document["prefill_s"]) + " of prefill; seed " +
                          document["seed"].dump());
}

std::string eval_page(const ordered_json& document) {
  const ordered_json& rows = document["results"];
  const std::string task = document["task"];
  if (task == "ruler") return ruler_page(document);
  if (task == "drafts") return draft_page(document);
  Page page("keyhole eval: " + task + ", " + format_count(document["tokens"]) + " tokens");
  put_eval_facts(page, document);
  if (document.contains("base")) {
    const ordered_json& base = document["base"];
    page.fact("base", base["file"].get<std::string>() + ", " + base["chunks"].dump() + " of " +
                          base["chunks_in_file"].dump() + " chunks of " + base["context"].dump() +
                          " tokens");
  }
  if (!rows.empty()) {
    const Worth worth = worth_of(rows.front(), document.contains("base"));
    page.section(worth.title);
    page.add(answers_of(rows, worth.quantity));
    page.section("What each way costs and is worth");
    page.add(curves_of(rows, worth.quantity));
    page.section("Figures",
                 worth.quantity.field == "kld.mean"
                     ? "Divergence of the next token's distribution, in nats."
                     : "lost / won: right with exact attention of this run and wrong here / "
                       "the other way round.");
    page.add(table_of(rows, worth.quantity));
    if (rows.front().contains("bins")) {
      page.section("By position",
                   "Equal parts of the tokens that were decoded behind the prompt, in order.");
      page.add(position_curves(rows));
      page.add(position_table(rows));
    }
  }
  put_page_command(page, document);
  return page.html(document);
}

}  // namespace keyhole::tools

#include "tools/commands/eval/draft_page.h"

#include <cmath>

#include "runtime/files/json.h"
#include "tools/commands/common/page_facts.h"
#include "tools/commands/eval/page.h"
#include "tools/page/page.h"
#include "tools/terminal/units.h"

namespace keyhole::tools {
namespace {

using nlohmann::ordered_json;

/// The way and its role: "codes:k=2,v=2, topk:100, of the draft".
std::string role_way_text(const ordered_json& row) {
  const std::string of = row["of"];
  return way_text(row) + (of == "both" ? "" : ", of the " + of);
}

Bars accepted_bars(const ordered_json& document) {
  Bars out;
  out.parts = {"tokens of a draft that were accepted, mean"};
  out.full = document["ahead"];
  for (const ordered_json& row : document["results"]) {
    const double mean = row["mean_accepted"];
    out.bars.push_back({role_way_text(row),
                        {mean},
                        format_number(mean, 3) + " of " + document["ahead"].dump() + ", " +
                            format_number(row["tokens_per_pass"].get<double>(), 3) +
                            " tokens a pass"});
  }
  return out;
}

Curves place_curves(const ordered_json& rows) {
  Curves out;
  out.group_title = "Way";
  out.kind_title = "Of";
  out.quantities = {{"place", "place in the draft", Scale::linear},
                    {"accepted", "share of rounds accepted up to there", Scale::linear, 0, true}};
  out.panels = {{0, 1}};
  Curves::View& view = out.views.emplace_back();
  view.name = "all";
  for (const ordered_json& row : rows) {
    double place = 1;
    for (const double share : row["accepted_by_place"]) {
      out.points.push_back({out.series_of(way_text(row), row["of"]),
                            role_way_text(row) + ", token " + format_number(place)});
      view.values.push_back({place, share});
      ++place;
    }
  }
  return out;
}

PageTable round_table(const ordered_json& rows) {
  PageTable table;
  table.columns = {{"way", true},       {"of", true},  {"accepted"}, {"above exact"},
                   {"tokens/pass"},     {"rounds"},    {"as plain"}, {"read/token"},
                   {"attention/token"}, {"index size"}};
  for (const ordered_json& row : rows) {
    const bool drafts = row["of"] != "target";
    const auto bytes = [&](const char* field) {
      const double value = figure_at(row, field);
      return drafts && std::isfinite(value) ? format_bytes(static_cast<uint64_t>(value)) : "-";
    };
    const auto with_error = [](double value, double error) {
      return format_number(value, 3) + " +- " + format_number(error, 2);
    };
    size_t as_plain = 0, tokens = 0;
    for (const ordered_json& text : row["texts"]) {
      as_plain += text["as_plain"].get<size_t>();
      tokens += text["tokens"].size();
    }
    const double attention = figure_at(row, "attention_ms_per_token");
    table.rows.push_back(
        {way_text(row), row["of"], with_error(row["mean_accepted"], row["standard_error"]),
         row.contains("above_exact") ? with_error(figure_at(row, "above_exact.mean_accepted"),
                                                  figure_at(row, "above_exact.standard_error"))
                                     : "-",
         format_number(row["tokens_per_pass"].get<double>(), 3), row["rounds"].dump(),
         std::to_string(as_plain) + "/" + std::to_string(tokens), bytes("bytes_read_per_token"),
         std::isfinite(attention) ? format_duration(1e-3 * attention) : "-", bytes("index_bytes")});
  }
  return table;
}

}  // namespace

std::string draft_page(const ordered_json& document) {
  Page page("keyhole eval: drafts, " + document["ahead"].dump() + " tokens ahead, behind " +
            format_count(document["tokens"]));
  put_eval_facts(page, document);
  page.fact("drafts", document["draft"].is_string() ? "by " + document["draft"].get<std::string>()
                                                    : std::string("by the model itself"));
  page.section("Accepted tokens",
               "Of a draft, those that the model would have chosen itself, up to the first other "
               "one. Either the draft or the model that checks it attends in the way named; the "
               "other one attends exactly.");
  page.add(accepted_bars(document));
  page.section("By the place in a draft");
  page.add(place_curves(document["results"]));
  page.section("Figures",
               "above exact: paired by prompt. as plain: first tokens that are those of plain "
               "decoding of the same model in the same way. read, attention and index: of a step "
               "of the draft.");
  page.add(round_table(document["results"]));
  put_page_command(page, document);
  return page.html(document);
}

}  // namespace keyhole::tools

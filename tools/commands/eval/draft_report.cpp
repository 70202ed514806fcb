#include "tools/commands/eval/draft_report.h"

#include <cmath>
#include <cstdio>
#include <utility>

#include "runtime/files/json.h"
#include "tools/commands/eval/ruler_report.h"
#include "tools/terminal/table.h"
#include "tools/terminal/units.h"

namespace keyhole::tools {

const char* role_text(DraftRole role) {
  constexpr const char* kTexts[] = {"both", "draft", "target"};
  return kTexts[static_cast<size_t>(role)];
}

EvalWay DraftRow::way() const { return mean_way(runs); }

DraftSums DraftRow::sums() const {
  DraftSums sums;
  for (const DraftedTokens& text : texts) {
    for (const DraftRound& round : text.rounds) sums.add(round);
  }
  return sums;
}

size_t DraftRow::tokens_as_plain() const {
  size_t tokens = 0;
  for (const PlainPart& part : as_plain) tokens += part.tokens;
  return tokens;
}

size_t DraftRow::tokens() const {
  size_t tokens = 0;
  for (const DraftedTokens& text : texts) tokens += text.tokens.size();
  return tokens;
}

std::vector<double> DraftRow::accepted_by_prompt() const {
  std::vector<double> means;
  for (const DraftedTokens& text : texts) {
    DraftSums sums;
    for (const DraftRound& round : text.rounds) sums.add(round);
    means.push_back(sums.mean_accepted());
  }
  return means;
}

double DraftRow::standard_error() const {
  const double mean = sums().mean_accepted();
  double squares = 0.0, n = 0.0;
  for (const DraftedTokens& text : texts) {
    for (const DraftRound& round : text.rounds) {
      squares += (round.accepted - mean) * (round.accepted - mean);
      ++n;
    }
  }
  return n > 1 ? std::sqrt(squares / (n * (n - 1))) : 0.0;
}

std::optional<Difference> accepted_above(const DraftRow& row, const DraftRow& exact) {
  if (&row == &exact) return std::nullopt;
  return paired_difference(row.accepted_by_prompt(), exact.accepted_by_prompt());
}

namespace {

/// Where texts part from plain decoding, and how near a tie that was.
std::string parting_text(const DraftRow& row) {
  std::string text;
  for (size_t i = 0; i < row.as_plain.size(); ++i) {
    const PlainPart& part = row.as_plain[i];
    if (std::isnan(part.margin)) continue;
    const std::string of =
        row.role == DraftRole::both ? "" : ", of the " + std::string(role_text(row.role));
    text += row.way().name() + of + ", prompt " + std::to_string(i + 1) +
            ": another token than plain decoding's after " + std::to_string(part.tokens) +
            ", where that preferred its own by " + format_number(part.margin) + " nats\n";
  }
  return text;
}

}  // namespace

std::string draft_text(const std::vector<DraftRow>& rows) {
  Table table({{"index", Table::Align::left},
               {"k"},
               {"attend", Table::Align::left},
               {"of", Table::Align::left},
               {"accepted"},
               {"above exact"},
               {"tokens/pass"},
               {"accepted by place, %", Table::Align::left},
               {"as plain"},
               {"read/token"},
               {"attention/token"},
               {"index size"}});
  std::string notes;
  for (const DraftRow& row : rows) {
    const EvalWay way = row.way();
    std::vector<std::string> cells = way_cells(way);
    const DraftSums sums = row.sums();
    cells.emplace_back(role_text(row.role));
    cells.push_back(format_number(sums.mean_accepted(), 3) + " +- " +
                    format_number(row.standard_error(), 2));
    cells.push_back(above_exact_cell(accepted_above(row, rows.front())));
    cells.push_back(format_number(sums.mean_accepted() + 1, 3));
    std::string places;
    for (const double share : sums.shares()) {
      places += (places.empty() ? "" : " ") + std::to_string(std::lround(100.0 * share));
    }
    cells.push_back(places);
    cells.push_back(std::to_string(row.tokens_as_plain()) + "/" + std::to_string(row.tokens()));
    const std::vector<std::string> cost =
        row.role == DraftRole::target ? std::vector<std::string>(6, "-") : cost_cells(way);
    for (const size_t i : {1U, 3U, 5U}) cells.push_back(cost[i]);
    table.add_row(std::move(cells));
    if (row.role != DraftRole::target) notes += emulation_text(way);
    notes += parting_text(row);
  }
  return table.text(style_of(stdout)) +
         "accepted: tokens of a draft that the target would have chosen itself; tokens/pass: "
         "those, "
         "and the one that it then chooses\n"
         "of: which of the two attends so, the other one exactly; as plain: first tokens that are "
         "those of plain decoding of that target\n"
         "read, attention and index: of a step of the draft\n" +
         notes;
}

nlohmann::ordered_json draft_json(const std::vector<DraftRow>& rows) {
  nlohmann::ordered_json out = nlohmann::ordered_json::array();
  for (const DraftRow& row : rows) {
    const DraftSums sums = row.sums();
    nlohmann::ordered_json texts = nlohmann::ordered_json::array();
    for (size_t i = 0; i < row.texts.size(); ++i) {
      std::vector<uint32_t> accepted;
      for (const DraftRound& round : row.texts[i].rounds) accepted.push_back(round.accepted);
      texts.push_back({{"tokens", row.texts[i].tokens},
                       {"as_plain", row.as_plain[i].tokens},
                       {"accepted", accepted}});
      const double margin = row.as_plain[i].margin;
      if (!std::isnan(margin)) texts.back()["margin"] = margin;
    }
    nlohmann::ordered_json result = {{"of", role_text(row.role)},
                                     {"rounds", sums.rounds},
                                     {"drafted", sums.drafted},
                                     {"accepted", sums.accepted},
                                     {"mean_accepted", sums.mean_accepted()},
                                     {"standard_error", row.standard_error()},
                                     {"tokens_per_pass", sums.mean_accepted() + 1},
                                     {"accepted_by_place", sums.shares()},
                                     {"texts", texts}};
    if (const auto d = accepted_above(row, rows.front())) {
      result["above_exact"] = {{"mean_accepted", d->mean}, {"standard_error", d->error}};
    }
    out.push_back(way_json(row.way(), result));
  }
  return out;
}

}  // namespace keyhole::tools

#include "tools/commands/eval/kld_report.h"

#include <algorithm>
#include <cstdio>
#include <optional>
#include <utility>

#include "runtime/files/json.h"
#include "tools/commands/eval/divergence.h"
#include "tools/commands/eval/scores.h"
#include "tools/terminal/table.h"
#include "tools/terminal/units.h"

namespace keyhole::tools {
namespace {

// Of the text in its order, for curves over the position.
constexpr size_t kPieces = 32;

}  // namespace

double KldRow::same_share() const {
  const std::vector<bool>& same = tokens.same_best;
  return static_cast<double>(std::count(same.begin(), same.end(), true)) /
         static_cast<double>(same.size());
}

std::string kld_table(std::span<const KldRow* const> rows, const KldRow& exact,
                      const std::string& from) {
  Table table({{"index", Table::Align::left},
               {"k"},
               {"attend", Table::Align::left},
               {"divergence"},
               {"p50"},
               {"p90"},
               {"p99"},
               {"p99.9"},
               {"largest"},
               {"same best"},
               {"bits/token"},
               {"above exact"},
               {"read/token"},
               {"attention/token"},
               {"index size"}});
  for (const KldRow* row : rows) {
    std::vector<std::string> cells = way_cells(row->way);
    const Spread s = spread_of(row->tokens.nats);
    cells.push_back(format_number(s.mean) + " +- " + format_number(s.error, 2));
    for (const double x : {s.p50, s.p90, s.p99, s.p999, s.largest}) {
      cells.push_back(format_number(x));
    }
    cells.push_back(format_number(100.0 * row->same_share(), 4) + " %");
    cells.push_back(format_number(mean_of(row->bits), 5));
    cells.push_back(above_exact_cell(
        row == &exact ? std::nullopt : std::optional(paired_difference(row->bits, exact.bits))));
    const std::vector<std::string> cost = cost_cells(row->way);
    for (const size_t i : {1U, 3U, 5U}) cells.push_back(cost[i]);
    table.add_row(std::move(cells));
  }
  return table.text(style_of(stdout)) + "divergence: of the next token's distribution from " +
         from + ", in nats; its mean, and quantiles over the tokens\n";
}

nlohmann::ordered_json kld_json(const KldRow& row, const KldRow& exact,
                                std::span<const size_t> ends, size_t bytes) {
  nlohmann::ordered_json json = {{"kld", spread_json(spread_of(row.tokens.nats))},
                                 {"same_best", row.same_share()},
                                 {"bits_per_token", mean_of(row.bits)}};
  if (bytes != 0) {
    json["bits_per_byte"] =
        mean_of(row.bits) * static_cast<double>(row.bits.size()) / static_cast<double>(bytes);
  }
  if (&row != &exact) {
    const Difference d = paired_difference(row.bits, exact.bits);
    json["above_exact"] = {{"bits_per_token", d.mean}, {"standard_error", d.error}};
  }
  json["kld_by_position"] = means_in_order(row.tokens.nats, kPieces);
  if (ends.size() > 1) json["bins"] = kld_bins_json(kld_bins(row.tokens, ends));
  return way_json(row.way, json);
}

}  // namespace keyhole::tools

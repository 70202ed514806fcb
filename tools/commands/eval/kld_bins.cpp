#include "tools/commands/eval/kld_bins.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <utility>

#include "runtime/files/json.h"
#include "tools/terminal/units.h"

namespace keyhole::tools {
namespace {

std::vector<Table::Column> bin_columns(bool audited) {
  std::vector<Table::Column> columns = {{"index", Table::Align::left},
                                        {"tokens decoded before"},
                                        {"divergence"},
                                        {"p50"},
                                        {"p99"},
                                        {"p99.9"},
                                        {"largest"},
                                        {"same best"}};
  if (audited) columns.push_back({"output error"});
  return columns;
}

}  // namespace

size_t bin_end(size_t tokens, size_t bins, size_t bin) { return tokens * (bin + 1) / bins; }

std::vector<KldBin> kld_bins(const KldTokens& tokens, std::span<const size_t> ends) {
  std::vector<KldBin> out;
  KldTokens::Audited before;
  for (size_t i = 0; i < ends.size(); ++i) {
    KldBin& bin = out.emplace_back();
    bin.begin = i == 0 ? 0 : out[i - 1].end;
    bin.end = ends[i];
    const auto at = [](const auto& values, size_t place) {
      return values.begin() + static_cast<std::ptrdiff_t>(place);
    };
    bin.nats = spread_of({at(tokens.nats, bin.begin), at(tokens.nats, bin.end)});
    const auto same =
        std::count(at(tokens.same_best, bin.begin), at(tokens.same_best, bin.end), true);
    bin.same_share = static_cast<double>(same) / static_cast<double>(bin.end - bin.begin);
    bin.output_error = std::nan("");
    if (tokens.audited.empty()) continue;
    const KldTokens::Audited now = tokens.audited[i];
    // The sum of errors is the mean times the number: of this part it is a difference of two sums.
    if (now.audits > before.audits) {
      const double sum = now.error_mean * static_cast<double>(now.audits) -
                         before.error_mean * static_cast<double>(before.audits);
      bin.output_error = std::max(0.0, sum / static_cast<double>(now.audits - before.audits));
    }
    before = now;
  }
  return out;
}

KldBinTable::KldBinTable(bool audited) : audited_(audited), table_(bin_columns(audited)) {}

void KldBinTable::add(const std::string& way, const std::vector<KldBin>& bins) {
  for (const KldBin& bin : bins) {
    std::vector<std::string> cells = {
        bin.begin == 0 ? way : "", format_count(bin.begin) + " to " + format_count(bin.end),
        format_number(bin.nats.mean) + " +- " + format_number(bin.nats.error, 2)};
    for (const double x : {bin.nats.p50, bin.nats.p99, bin.nats.p999, bin.nats.largest}) {
      cells.push_back(format_number(x));
    }
    cells.push_back(format_number(100.0 * bin.same_share, 4) + " %");
    if (audited_) {
      cells.push_back(std::isnan(bin.output_error) ? "-" : format_number(bin.output_error));
    }
    table_.add_row(std::move(cells));
  }
}

std::string KldBinTable::text() const { return table_.text(style_of(stdout)); }

nlohmann::ordered_json spread_json(const Spread& spread) {
  return {{"mean", spread.mean},      {"standard_error", spread.error},
          {"p50", spread.p50},        {"p90", spread.p90},
          {"p99", spread.p99},        {"p99_9", spread.p999},
          {"largest", spread.largest}};
}

nlohmann::ordered_json kld_bins_json(const std::vector<KldBin>& bins) {
  nlohmann::ordered_json json = nlohmann::ordered_json::array();
  for (const KldBin& bin : bins) {
    nlohmann::ordered_json& entry = json.emplace_back();
    entry["begin"] = bin.begin;
    entry["end"] = bin.end;
    entry["kld"] = spread_json(bin.nats);
    entry["same_best"] = bin.same_share;
    if (!std::isnan(bin.output_error)) entry["output_error"] = bin.output_error;
  }
  return json;
}

}  // namespace keyhole::tools

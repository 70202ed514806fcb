// Divergence by position: a decoded text cut into equal parts, so that an error that grows with what was appended
// shows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>
#include <vector>

#include "tools/commands/eval/divergence.h"
#include "tools/terminal/table.h"

namespace keyhole::tools {

/// What is known of a decoded text, token by token; and of the audits, behind each part.
struct KldTokens {
  std::vector<double> nats;     ///< the divergence from exact attention
  std::vector<bool> same_best;  ///< whether the likeliest successor is exact attention's
  /// The audits since the beginning, when a part ended: their number, and their mean output error. Empty without
  /// audits.
  struct Audited {
    uint64_t audits = 0;
    double error_mean = 0.0;
  };
  std::vector<Audited> audited;
};

/// One part of the text: tokens [begin, end) of those that were decoded.
struct KldBin {
  size_t begin = 0, end = 0;
  Spread nats;
  double same_share = 0.0;
  double output_error = 0.0;  ///< mean of the audits of this part; NaN without any
};

/// The end of part `bin` of `bins` nearly equal parts of `tokens` tokens; that of part -1 would be 0.
[[nodiscard]] size_t bin_end(size_t tokens, size_t bins, size_t bin);

/// The parts in order. ends: where each ends, rising, the last at the number of tokens.
[[nodiscard]] std::vector<KldBin> kld_bins(const KldTokens& tokens, std::span<const size_t> ends);

/// A table of the parts, the ways one below the other; a column of output errors where there are any.
class KldBinTable {
 public:
  explicit KldBinTable(bool audited);
  void add(const std::string& way, const std::vector<KldBin>& bins);
  [[nodiscard]] std::string text() const;

 private:
  bool audited_;
  Table table_;
};

/// The parts as JSON, in order; and the figures of a spread.
[[nodiscard]] nlohmann::ordered_json kld_bins_json(const std::vector<KldBin>& bins);
[[nodiscard]] nlohmann::ordered_json spread_json(const Spread& spread);

}  // namespace keyhole::tools

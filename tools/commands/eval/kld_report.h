// What `keyhole eval --task kld` says of the ways that it has held against other predictions: a row for each.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>
#include <vector>

#include "tools/commands/eval/kld_bins.h"
#include "tools/commands/eval/ways.h"

namespace keyhole::tools {

/// What one way has predicted.
struct KldRow {
  EvalWay way;
  KldTokens tokens;
  std::vector<double> bits;  ///< of each predicted token

  [[nodiscard]] double same_share() const;
};

/// A table of the rows, each with its bits above those of `exact`, which is one of them: divergences, quantiles, costs.
/// from: what predictions are held against, "exact attention's", for the line below the table.
[[nodiscard]] std::string kld_table(std::span<const KldRow* const> rows, const KldRow& exact,
                                    const std::string& from);

/// The JSON of a row. ends: where the parts of --bins end, rising, the last at the number of tokens; of one part there
/// are no bins. bytes: of the text of all predicted tokens; 0 where nobody knows.
[[nodiscard]] nlohmann::ordered_json kld_json(const KldRow& row, const KldRow& exact,
                                              std::span<const size_t> ends, size_t bytes);

}  // namespace keyhole::tools

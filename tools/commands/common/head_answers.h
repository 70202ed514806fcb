// The answers of a way of searching to every query of a head, kept only where somebody asks for them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tools/commands/common/head_truth.h"

namespace keyhole::tools {

/// Answers by rows; row r is row r of the truth.
struct HeadAnswers {
  size_t count = 0;  ///< neighbours of a row
  std::vector<int64_t>
      neighbours;  ///< `[rows, count]` offloaded keys, the best first; -1: there were fewer
  std::vector<float> products;  ///< `[rows, count]` inner products with the query; -inf likewise
  std::vector<double> step_us;  ///< `[rows / group]` microseconds of each step
  double found = 0;  ///< mean number of distinct keys of a row, before all but `count` are left out

  HeadAnswers() = default;
  HeadAnswers(const HeadTruth& truth, size_t neighbours_of_a_row);

  /// Puts the answer of row `row`. ids: distinct offloaded keys that count for it, in any order.
  void put(const HeadTruth& truth, size_t row, std::span<const uint32_t> ids);
};

}  // namespace keyhole::tools

// The profile of a model's heads: where their attention lies, and over how many tokens it is spread.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "tools/commands/common/head_truth.h"
#include "tools/terminal/style.h"

namespace keyhole::tools {

/// One (layer, KV head): means over all used queries of its query heads.
struct HeadProfile {
  uint32_t layer = 0, kv_head = 0;
  double sink_mass = 0, window_mass = 0,
         middle_mass = 0;             ///< shares of the softmax weight; their sum is 1
  double largest_weight = 0;          ///< of a single token
  double tokens = 0, tokens_p95 = 0;  ///< the fewest that hold the stated share of the weight
  double middle_tokens = 0;           ///< the same of the offloaded tokens and their weight
  double sparsity = 0;                ///< share of the visible tokens that is not among them
};

/// Makes the profile of a head. truth: with its spread.
[[nodiscard]] HeadProfile profile_of(const HeadTruth& truth, uint32_t layer, uint32_t kv_head);

[[nodiscard]] nlohmann::ordered_json to_json(const HeadProfile& profile);
/// CSV with a line for each head, under the names of the JSON's fields.
[[nodiscard]] std::string to_csv(const std::vector<HeadProfile>& profiles);
/// The titles of the columns of a table of heads, on a terminal and on a page. `share`: that of the weight.
[[nodiscard]] std::vector<std::string> profile_titles(double share);
[[nodiscard]] std::string profile_table(const std::vector<HeadProfile>& profiles, double share,
                                        const Style& style);

/// A page of the JSON result, see heads.cpp.
[[nodiscard]] std::string heads_page(const nlohmann::ordered_json& document);

}  // namespace keyhole::tools

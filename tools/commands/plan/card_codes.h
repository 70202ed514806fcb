// What the spec of an index, "codes:k=4,v=4,lists=64", says of the codes that a card has, and what a plan adds to it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace keyhole::tools {

/// Codes on a card.
struct CardCodes {
  bool any = false;              ///< the index has codes
  double bits = 2.0;             ///< of a component, the mean of K's and V's
  bool lists = false;            ///< steps choose among lists
  bool lists_lack_room = false;  ///< there would be lists, were there more memory
  uint32_t list_rows = 0;  ///< of a list on average, as the spec asks for them; 0: it asks for none
  double list_share = 0.12;  ///< of the rows that a step reads
  /// Of a KV head, of a budgets file that says it.
  std::optional<uint32_t> exact_rows = {};
};

/// The codes of a spec, without lists: a plan says whether there are some.
[[nodiscard]] CardCodes codes_of(const std::string& spec);

/// The spec with "lists=0"; empty where it asks for no lists.
[[nodiscard]] std::string without_lists(std::string spec);

}  // namespace keyhole::tools

// Tokens a second that a card will reach at a context, for people and for machines.
#pragma once

#include <keyhole/inspect.h>
#include <keyhole/keyhole.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "runtime/files/json.h"
#include "tools/commands/plan/card_codes.h"
#include "tools/commands/plan/cards.h"
#include "tools/terminal/style.h"

namespace keyhole::tools {

/// What is estimated for.
struct CardQuestion {
  Card card;
  keyhole_engine_config engine{};
  uint32_t full_layers = 0;   ///< that attend to all tokens
  uint64_t context = 0;       ///< tokens
  uint64_t resident = 0;      ///< of these in sink and window
  uint64_t weights = 0;       ///< bytes that a token's products read; 0: not known
  uint64_t all_weights = 0;   ///< bytes that the card holds
  uint64_t memory = 0;        ///< bytes of the card that there are for them and for K and V
  uint32_t exact_rows = 16;   ///< CardLayer::exact_rows
  bool int8_on_host = false;  ///< offloaded K and V are in int8
};

/// One index of the plan.
struct CardEstimate {
  std::string index;
  bool fits = false;
  std::string why_not;     ///< why there is no estimate; empty: there is one
  double layer = 0.0;      ///< seconds of a layer's attention
  double attention = 0.0;  ///< of all layers
  double token = 0.0;      ///< with the weights; 0 where those are not known
  /// Rows of a KV head that are read exactly, where a budgets file says it.
  std::optional<uint32_t> exact_rows = {};
  bool asks_for_lists = false;
  bool lists_lack_room = false;  ///< CardCodes::lists_lack_room
  double list_share = 0.0;       ///< of the rows that steps read of lists; 0: no lists
};

/// codes: those that the plan has on the card.
[[nodiscard]] CardEstimate estimate_codes(const CardQuestion& question, const std::string& index,
                                          const keyhole_memory_plan& plan, const CardCodes& codes);
/// Full attention with K and V on the card, whether or not they fit there.
[[nodiscard]] CardEstimate estimate_full(const CardQuestion& question);

/// The estimates as a table, with the card and everything that they take for granted.
[[nodiscard]] std::string card_text(const CardQuestion& question,
                                    const std::vector<CardEstimate>& estimates, const Style& style);
[[nodiscard]] nlohmann::ordered_json card_json(const CardQuestion& question,
                                               const std::vector<CardEstimate>& estimates);

}  // namespace keyhole::tools

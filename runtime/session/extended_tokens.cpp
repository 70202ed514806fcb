#include "runtime/session/extended_tokens.h"

#include <string>

namespace keyhole::runtime {

ExtendedTokens::Extended ExtendedTokens::agreed(const Sequence& sequence) const {
  const auto bad = [](const std::string& text) { throw Error(Status::invalid_argument, text); };
  const auto name = [](uint32_t layer) { return "layer " + std::to_string(layer); };
  Extended agreed;
  uint32_t agreed_layer = 0;
  for (uint32_t layer = 0; layer < layers_.size(); ++layer) {
    const Extended& e = layers_[layer];
    if (e.tokens == 0) continue;
    if (e.changed || (!e.on_stream && sequence.tokens(layer) != e.before + e.tokens)) {
      bad(name(layer) + ": another call has changed its tokens since keyhole_session_extend");
    }
    if (agreed.tokens == 0) {
      agreed = e;
      agreed_layer = layer;
    } else if (e.tokens != agreed.tokens || e.before != agreed.before) {
      bad(name(layer) + " was extended by " + std::to_string(e.tokens) + " tokens after " +
          std::to_string(e.before) + ", " + name(agreed_layer) + " by " +
          std::to_string(agreed.tokens) + " after " + std::to_string(agreed.before) +
          ", needed: the same tokens in all layers");
    }
  }
  if (agreed.tokens == 0) bad("there is no keyhole_session_extend whose tokens could be accepted");
  return agreed;
}

}  // namespace keyhole::runtime

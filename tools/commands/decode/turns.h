// How what a person says becomes tokens that the conversation goes on with.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tools/tokenizer/tokenizer.h"

namespace keyhole::tools {

/// Turns as they are typed: one text that the model continues.
class Turns {
 public:
  /// Borrows the tokenizer.
  explicit Turns(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {}

  /// All that has been said with `said` behind it. An end token that ended the last answer goes: the text goes on.
  [[nodiscard]] std::vector<uint32_t> with(std::vector<uint32_t> conversation,
                                           const std::string& said) const;
  /// Whether an answer goes on from the text before it, or is one of its own.
  [[nodiscard]] DecodeState answer_state() const { return DecodeState::in_text(); }

 private:
  const Tokenizer& tokenizer_;
};

}  // namespace keyhole::tools

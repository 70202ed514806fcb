// How what a person says becomes tokens that the conversation goes on with.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tools/tokenizer/chat.h"
#include "tools/tokenizer/tokenizer.h"

namespace keyhole::tools {

/// Borrows the tokenizer.
class Turns {
 public:
  /// One text that the model continues, as it is typed.
  explicit Turns(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {}
  /// Messages in the form of the model's template, behind one of the system where `system` is not empty.
  Turns(const Tokenizer& tokenizer, ChatTemplate chat, std::string system);

  /// All that has been said with `said` behind it. An end token of the last answer goes: of a text, because the text goes on; of a
  /// chat, because the template has its own. Throws std::runtime_error with the words of a template that refuses it.
  [[nodiscard]] std::vector<uint32_t> with(std::vector<uint32_t> conversation,
                                           const std::string& said) const;
  /// Whether an answer goes on from the text before it, or is one of its own.
  [[nodiscard]] DecodeState answer_state() const;
  /// What ends an answer: the tokenizer's end tokens, and the template's.
  [[nodiscard]] std::vector<uint32_t> end_tokens() const;

 private:
  const Tokenizer& tokenizer_;
  std::optional<ChatTemplate> chat_;
  std::string system_;
};

}  // namespace keyhole::tools

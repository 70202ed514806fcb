// Turns what a person says into tokens with which the conversation goes on.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tools/tokenizer/chat.h"
#include "tools/tokenizer/tokenizer.h"

namespace keyhole::tools {

/// The form of a conversation, a text or a chat. Borrows the tokenizer.
class Turns {
 public:
  /// The form of one text that the model continues, as it is typed.
  explicit Turns(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {}
  /// The form of messages in the model's template, behind a system message where `system` is not empty.
  Turns(const Tokenizer& tokenizer, ChatTemplate chat, std::string system);

  /// All that has been said, with `said` behind it. An end token of the last answer is dropped: a text goes on, and a
  /// chat's template has its own. Throws std::runtime_error with the words of a template that refuses it.
  [[nodiscard]] std::vector<uint32_t> with(std::vector<uint32_t> conversation,
                                           const std::string& said) const;
  /// Whether an answer continues the text before it, or is a text of its own.
  [[nodiscard]] DecodeState answer_state() const;
  /// The tokens that end an answer: the tokenizer's and the template's.
  [[nodiscard]] std::vector<uint32_t> end_tokens() const;

 private:
  const Tokenizer& tokenizer_;
  std::optional<ChatTemplate> chat_;
  std::string system_;
};

}  // namespace keyhole::tools

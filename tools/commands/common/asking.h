// How a task is put to a model: as a text that it continues, or as a chat with an instruct model.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tools/tasks/task.h"
#include "tools/tokenizer/chat.h"

namespace keyhole::tools {

/// Context, then questions. As a text, the answer has to begin with exactly the task's answer; in a chat, and where
/// the task has none, it has to contain all values, as models put them in sentences of their own.
class Asking {
 public:
  /// The tokenizer lives longer. `chat`: nothing for a text.
  Asking(const Tokenizer& tokenizer, std::optional<ChatTemplate> chat)
      : tokenizer_(&tokenizer), chat_(std::move(chat)) {}

  [[nodiscard]] bool chats() const { return chat_.has_value(); }

  /// The prompt up to the end of `context`: a prompt of its own, with BOS.
  [[nodiscard]] std::vector<uint32_t> context(const std::string& context) const;
  /// What follows the context, or an answer to another question: the question and what begins its answer.
  [[nodiscard]] std::vector<uint32_t> first_question(const Question& question) const;
  [[nodiscard]] std::vector<uint32_t> next_question(const Question& question) const;
  /// The right answer as the model would write it, with what ends it.
  [[nodiscard]] std::vector<uint32_t> answer(const Question& question) const;

  /// Whether the answer may have any length.
  [[nodiscard]] bool free(const Question& question) const {
    return chat_ || question.answer.empty();
  }
  /// Whether an answer so far says all that counts: one that reached the task's end of an answer, or is too long for
  /// it.
  [[nodiscard]] bool complete(const Question& question, const std::string& text) const;
  [[nodiscard]] bool right(const Question& question, const std::string& text) const;
  /// The share of the question's values that an answer contains.
  [[nodiscard]] static double found(const Question& question, const std::string& text);

 private:
  const Tokenizer* tokenizer_;
  std::optional<ChatTemplate> chat_;
};

}  // namespace keyhole::tools

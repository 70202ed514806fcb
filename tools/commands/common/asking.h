// How a task is put to a model: as a text that it continues, or as a chat with an instruct model.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tools/tasks/task.h"
#include "tools/tokenizer/chat.h"

namespace keyhole::tools {

/// Puts a task: its context, then questions. As a text, the answer has to begin with exactly the task's answer. In a
/// chat, and where the task has no exact answer, it has to contain all values, because models put them in sentences
/// of their own.
class Asking {
 public:
  /// Borrows the tokenizer. `chat`: nothing for a text.
  Asking(const Tokenizer& tokenizer, std::optional<ChatTemplate> chat)
      : tokenizer_(&tokenizer), chat_(std::move(chat)) {}

  [[nodiscard]] bool chats() const { return chat_.has_value(); }

  /// The prompt up to the end of `context`: a prompt of its own, with BOS.
  [[nodiscard]] std::vector<uint32_t> context(const std::string& context) const;
  /// The tokens that follow the context, or an answer to another question: the question and the beginning of its
  /// answer.
  [[nodiscard]] std::vector<uint32_t> first_question(const Question& question) const;
  [[nodiscard]] std::vector<uint32_t> next_question(const Question& question) const;
  /// The right answer as the model would write it, including its end.
  [[nodiscard]] std::vector<uint32_t> answer(const Question& question) const;

  /// Whether the answer may have any length.
  [[nodiscard]] bool free(const Question& question) const {
    return chat_ || question.answer.empty();
  }
  /// Whether an answer so far is enough to be judged: it has reached the task's end of an answer, or is too long for
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

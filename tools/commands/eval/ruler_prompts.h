// The prompts of `eval --task ruler`: what the tasks are made of, and samples as tokens.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "tools/commands/eval/options.h"
#include "tools/tasks/ruler/qa_data.h"
#include "tools/tasks/ruler/samples.h"
#include "tools/tasks/ruler/tasks.h"
#include "tools/tokenizer/chat.h"

namespace keyhole::tools {

class RulerPrompts {
 public:
  /// Reads the prose and the data that the tasks need, and borrows the tokenizer. Throws UsageError where the data of
  /// a task is not named, std::runtime_error for files that cannot be read.
  RulerPrompts(const EvalOptions& options, const Tokenizer& tokenizer);

  /// The samples of a task that fill `length` with their answers. Throws UsageError, which names task and length,
  /// where they do not fit.
  [[nodiscard]] std::unique_ptr<ruler::Samples> samples(const ruler::TaskInfo& task,
                                                        uint32_t length) const;

  /// The whole prompt: as a text with what the vocabulary puts in front, or in a chat as the user's message, with the
  /// beginning of the answer behind it.
  [[nodiscard]] std::vector<uint32_t> encode(const ruler::Sample& sample) const;

  /// The tokens by which a session comes to each question of a sample: the whole prompt, then for each follow-up what
  /// the session takes behind the beginning of the answer before it: the right answer, its end in a chat, the question
  /// and the beginning of the next answer.
  [[nodiscard]] std::vector<std::vector<uint32_t>> turns(const ruler::Sample& sample) const;

  /// A sample as one JSON object: the task's name, budget of the answer and score, prompt, prefix, references, and
  /// follow-ups with the right answers that stand before them.
  [[nodiscard]] static nlohmann::ordered_json to_json(const ruler::TaskInfo& task,
                                                      const ruler::Sample& sample);

  /// The note about the essays of the tasks that have some; empty for tasks without.
  [[nodiscard]] std::string note() const;

 private:
  /// The tokens of a text by itself, and of a sample with all its turns: by the tokenizer, or by bytes.
  [[nodiscard]] size_t count(const std::string& text) const;
  [[nodiscard]] size_t count(const ruler::Sample& sample) const;
  /// What turns() says of a follow-up; `right`: the answer before it.
  [[nodiscard]] std::vector<uint32_t> follow_up(const std::string& right,
                                                const ruler::FollowUp& next) const;

  const EvalOptions& options_;
  const Tokenizer& tokenizer_;
  std::optional<ChatTemplate> chat_;
  std::string prose_;
  std::optional<ruler::QaData> squad_, hotpot_qa_;
};

}  // namespace keyhole::tools

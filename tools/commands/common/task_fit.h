// Tasks are made in bytes, and asked for in tokens: the context that fills so many tokens of a vocabulary.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tools/commands/common/decoding.h"
#include "tools/tokenizer/tokenizer.h"

namespace keyhole::tools {

/// The most bytes, of those tried, whose `count(bytes)` tokens are at most `tokens`; it is tried last. `density` is
/// the tokens of a byte, about, where the search begins. Stops where fewer than 17 tokens, or a thousandth, are free.
/// 0 where not even one byte fits.
[[nodiscard]] size_t fit_bytes(size_t tokens, double density,
                               const std::function<size_t(size_t bytes)>& count);

/// Tokens of a byte of `sample`, BOS and the like not counted; 1 for an empty one.
[[nodiscard]] double token_density(const Tokenizer& tokenizer, std::string_view sample);
/// Of the text that a task's context consists of.
[[nodiscard]] double token_density(const Tokenizer& tokenizer, const TaskOptions& options);

/// A task, and its context as tokens of a prompt.
struct FittedTask {
  Task task;
  std::vector<uint32_t> tokens;
};

/// A task whose context has at most `tokens` tokens with all that stands around it, and hardly fewer; with `questions`
/// questions, or with 0 as many as fit, `usual` at most. `encode` makes the prompt of a context:
/// Tokenizer::encode_prompt, or a chat. Throws UsageError as make_task() does.
using EncodeContext = std::function<std::vector<uint32_t>(const std::string& context)>;
[[nodiscard]] FittedTask fit_task(const TaskOptions& options, uint32_t tokens, size_t questions,
                                  size_t usual, double density, const EncodeContext& encode);
/// The same as a plain prompt.
[[nodiscard]] FittedTask fit_task(const Tokenizer& tokenizer, const TaskOptions& options,
                                  uint32_t tokens, size_t questions, size_t usual);

}  // namespace keyhole::tools

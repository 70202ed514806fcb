// Fits tasks, which are made in bytes, to contexts, which are asked for in tokens.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tools/commands/common/task_options.h"
#include "tools/tokenizer/tokenizer.h"

namespace keyhole::tools {

/// Finds the most bytes, of those tried, for which `count(bytes)` is at most `tokens`; these are tried last.
/// `density`: about how many tokens a byte has, where the search begins. Stops where fewer than 17 tokens, or a
/// thousandth, are free. 0 where not even one byte fits.
[[nodiscard]] size_t fit_bytes(size_t tokens, double density,
                               const std::function<size_t(size_t bytes)>& count);

/// Tokens per byte of `sample`, without BOS and the like; 1 for an empty sample.
[[nodiscard]] double token_density(const Tokenizer& tokenizer, std::string_view sample);
/// Tokens per byte of the text that a task's context consists of.
[[nodiscard]] double token_density(const Tokenizer& tokenizer, const TaskOptions& options);

/// A task, and its context as tokens of a prompt.
struct FittedTask {
  Task task;
  std::vector<uint32_t> tokens;
};

/// Makes a task whose context has at most `tokens` tokens including all that stands around it, and hardly fewer. It
/// has `questions` questions, or with 0 as many as fit, at most `usual`. `encode` makes the prompt of a context:
/// Tokenizer::encode_prompt, or a chat. Throws UsageError as make_task() does.
using EncodeContext = std::function<std::vector<uint32_t>(const std::string& context)>;
[[nodiscard]] FittedTask fit_task(const TaskOptions& options, uint32_t tokens, size_t questions,
                                  size_t usual, double density, const EncodeContext& encode);
/// fit_task() with the context as a plain prompt.
[[nodiscard]] FittedTask fit_task(const Tokenizer& tokenizer, const TaskOptions& options,
                                  uint32_t tokens, size_t questions, size_t usual);

}  // namespace keyhole::tools

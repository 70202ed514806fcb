#include "tools/commands/decode/prompt.h"

#include "tools/commands/common/prompt_text.h"
#include "tools/commands/common/task_fit.h"
#include "tools/terminal/errors.h"
#include "tools/tokenizer/token_file.h"

namespace keyhole::tools {

Prompt make_prompt(const DecodeOptions& options, const Tokenizer* tokenizer, const Turns* turns,
                   const std::vector<uint32_t>& conversation) {
  const int sources = static_cast<int>(!options.prompt_file.empty()) +
                      static_cast<int>(!options.token_file.empty()) +
                      static_cast<int>(!options.task.task.empty());
  if (sources == 0 && (options.interactive || !options.load_session.empty())) return {};
  if (sources != 1) throw UsageError("name exactly one of --prompt, --tokens and --task");
  if (!options.token_file.empty()) return {read_token_file(options.token_file), ""};
  const std::vector<uint32_t> before = options.chat ? conversation : std::vector<uint32_t>();
  if (!options.prompt_file.empty()) {
    Prompt prompt{turns->with(before, read_prompt_file(options.prompt_file)), ""};
    check_not_empty(prompt.tokens, options.prompt_file);
    return prompt;
  }
  const size_t question_bytes = max_question_bytes(options.task.task);
  const uint32_t length = length_of(options.task);
  if (length < question_bytes + 300) {
    throw UsageError("--length is " + std::to_string(length) +
                     "; allowed with --task: " + std::to_string(question_bytes + 300) + " or more");
  }
  const FittedTask fitted =
      fit_task(options.task, static_cast<uint32_t>(length - question_bytes), 1, 1,
               token_density(*tokenizer, options.task),
               [&](const std::string& context) { return turns->with(before, context); });
  const Question& question = fitted.task.questions.front();
  return {turns->with(before, fitted.task.context + question.prompt), question.answer};
}

}  // namespace keyhole::tools

#include "tools/commands/common/task_fit.h"

#include <algorithm>
#include <cmath>

#include "tools/terminal/errors.h"

namespace keyhole::tools {

size_t fit_bytes(size_t tokens, double density, const std::function<size_t(size_t)>& count) {
  constexpr int kTries = 12;
  const size_t slack = std::max<size_t>(16, tokens / 1000);
  const auto guess_of = [tokens](double per_byte) {
    return static_cast<size_t>(static_cast<double>(tokens) / std::max(per_byte, 1e-3));
  };
  size_t best = 0;
  size_t tried = 0;
  size_t above = SIZE_MAX;  // too many from here on
  size_t guess = std::max<size_t>(1, guess_of(density));
  for (int i = 0; i < kTries && guess > best && guess < above; ++i) {
    const size_t used = count(guess);
    tried = guess;
    if (used <= tokens) {
      best = guess;
      if (tokens - used <= slack) break;
    } else {
      above = guess;
    }
    // The next try is a little below proportion: a text that is too long costs another try, one that is slightly too
    // short is done.
    const double per_byte = static_cast<double>(used) / static_cast<double>(guess);
    guess = guess_of(per_byte * (1.0 + 1e-4));
    if (guess <= best || guess >= above)
      guess = above == SIZE_MAX ? best + 1 : best + (above - best) / 2;
  }
  if (best != 0 && tried != best) (void)count(best);
  return best;
}

double token_density(const Tokenizer& tokenizer, std::string_view sample) {
  if (sample.empty()) return 1.0;
  return static_cast<double>(std::max<size_t>(1, tokenizer.encode(sample).size())) /
         static_cast<double>(sample.size());
}

double token_density(const Tokenizer& tokenizer, const TaskOptions& options) {
  constexpr size_t kSample = 8192;
  if (options.task == "copy")
    return token_density(tokenizer, haystack_of(options).substr(0, kSample));
  return token_density(tokenizer, make_task(options, kSample, 1).context);
}

FittedTask fit_task(const TaskOptions& options, uint32_t tokens, size_t questions, size_t usual,
                    double density, const EncodeContext& encode) {
  FittedTask fitted;
  // The tokens around the context are subtracted first, because the proportion is that of the context alone.
  const size_t frame = encode("").size();
  const auto count = [&](size_t bytes) {
    const size_t wanted =
        questions != 0 ? questions : fitting_questions(options.task, bytes, usual);
    fitted.task = make_task(options, bytes, wanted);
    fitted.tokens = encode(fitted.task.context);
    return fitted.tokens.size() - std::min(frame, fitted.tokens.size());
  };
  if (frame >= tokens || fit_bytes(tokens - frame, density, count) == 0) {
    throw UsageError("--length " + options.length + " has no room for a context");
  }
  return fitted;
}

FittedTask fit_task(const Tokenizer& tokenizer, const TaskOptions& options, uint32_t tokens,
                    size_t questions, size_t usual) {
  return fit_task(options, tokens, questions, usual, token_density(tokenizer, options),
                  [&](const std::string& context) { return tokenizer.encode_prompt(context); });
}

}  // namespace keyhole::tools

#include "tools/commands/eval/draft_options.h"

#include <memory>

#include "tools/commands/common/prompt_text.h"
#include "tools/llama/config.h"
#include "tools/terminal/cli.h"
#include "tools/terminal/errors.h"

namespace keyhole::tools {

void add_draft_options(CLI::App& command, DraftOptions& options) {
  command
      .add_option("--draft", options.folder,
                  "Model that drafts in --task drafts, with the tokenizer of --model; default: the "
                  "model itself")
      ->type_name("DIR");
  command
      .add_option(
          "--ahead", options.ahead,
          "Tokens that are drafted before the model takes them, of --task drafts; default: " +
              std::to_string(DraftOptions::kUsualAhead))
      ->type_name("TOKENS")
      ->check(CLI::Range(1U, 255U));
}

std::string token_difference(const Tokenizer& draft, const Tokenizer& target) {
  if (draft.vocab_size() != target.vocab_size()) {
    return "it has " + std::to_string(draft.vocab_size()) + " tokens, not " +
           std::to_string(target.vocab_size());
  }
  for (uint32_t token = 0; token < target.vocab_size(); ++token) {
    const std::string name = "token " + std::to_string(token);
    const std::string theirs = draft.token_text(token), ours = target.token_text(token);
    if (theirs != ours)
      return name + " is \"" + printable(theirs) + "\", not \"" + printable(ours) + "\"";
    if (draft.is_special(token) != target.is_special(token)) {
      return name + " is " + (draft.is_special(token) ? "" : "not ") + "a special one";
    }
    if (draft.ends(token) != target.ends(token)) {
      return name + (draft.ends(token) ? " ends" : " does not end") + " a text";
    }
  }
  return "";
}

void check_same_tokens(const ModelOptions& draft, const ModelOptions& target) {
  check_model_folder(draft.folder);
  const LlamaConfig theirs = load_llama_config(model_folder(draft) / "config.json");
  const LlamaConfig ours = load_llama_config(model_folder(target) / "config.json");
  const auto refuse = [&draft](const std::string& why) {
    throw UsageError("--draft " + draft.folder + ": " + why +
                     "; allowed: a model with the tokens of --model");
  };
  if (theirs.vocab_size != ours.vocab_size) {
    refuse("vocab_size is " + std::to_string(theirs.vocab_size) + ", that of --model " +
           std::to_string(ours.vocab_size));
  }
  const auto their_tokens = find_tokenizer(draft, theirs),
             our_tokens = find_tokenizer(target, ours);
  if (!their_tokens && !our_tokens) return;
  if (!their_tokens || !our_tokens) {
    refuse(std::string(their_tokens ? "it has a tokenizer, and --model has none"
                                    : "it has no tokenizer, and --model has one"));
  }
  if (const std::string why = token_difference(*their_tokens, *our_tokens); !why.empty()) {
    refuse(why);
  }
}

}  // namespace keyhole::tools

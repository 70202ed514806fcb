// The options of `eval --task drafts`, and the check that the draft model's tokens are the model's.
#pragma once

#include <cstdint>
#include <string>

#include "tools/commands/common/cli_fwd.h"
#include "tools/commands/common/model_options.h"
#include "tools/tokenizer/tokenizer.h"

namespace keyhole::tools {

struct DraftOptions {
  std::string folder;  ///< of the draft model; empty: the model drafts for itself
  uint32_t ahead = 0;  ///< tokens of a draft; 0: kUsualAhead
  static constexpr uint32_t kUsualAhead = 8;

  [[nodiscard]] bool given() const { return !folder.empty() || ahead != 0; }
  [[nodiscard]] uint32_t tokens_ahead() const { return ahead == 0 ? kUsualAhead : ahead; }
};

/// Adds `--draft` and `--ahead`.
void add_draft_options(CLI::App& command, DraftOptions& options);

/// How ids of the draft's vocabulary differ from those of the target's, e.g. "token 17 is \"a\", not \"b\"": their
/// number, their texts, which are special, which end a text. "" where they mean the same.
[[nodiscard]] std::string token_difference(const Tokenizer& draft, const Tokenizer& target);

/// Throws UsageError where the tokens of the draft model are not those of the model. Of folders without a tokenizer, as
/// --tokens allows them, only the sizes of the vocabularies are compared.
void check_same_tokens(const ModelOptions& draft, const ModelOptions& target);

}  // namespace keyhole::tools

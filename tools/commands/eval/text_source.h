// The text of `keyhole eval --task text`, `--task kld` and `--task drafts`.
#pragma once

#include <cstdint>
#include <vector>

#include "tools/commands/eval/options.h"

namespace keyhole::tools {

/// A text cut into what is prefilled and what is decoded. Its last token is never decoded, only predicted.
struct Text {
  std::vector<uint32_t> context;
  std::vector<uint32_t> decoded;
  size_t bytes = 0;  ///< of the predicted tokens; 0 where nobody knows
  /// Whether a token is a byte.
  [[nodiscard]] bool of_bytes() const { return bytes == decoded.size() - 1; }
};

/// Reads the text that the options name: --prompt, --tokens or the bundled prose. Throws UsageError where it is too
/// short.
[[nodiscard]] Text make_text(const EvalOptions& options);

/// Cuts `count` prompts of --length tokens out of that text, which begin all over it, at places that --seed draws, each
/// with what the vocabulary puts in front of a prompt. Throws UsageError where the text is too short.
[[nodiscard]] std::vector<std::vector<uint32_t>> make_passages(const EvalOptions& options,
                                                               uint32_t count);

}  // namespace keyhole::tools

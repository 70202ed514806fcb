// The prompt that decode continues.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tools/commands/decode/options.h"
#include "tools/commands/decode/turns.h"
#include "tools/tokenizer/tokenizer.h"

namespace keyhole::tools {

struct Prompt {
  std::vector<uint32_t> tokens;  ///< empty: none was given
  std::string expected;          ///< the task's answer; empty for other prompts
};

/// Makes the prompt of --prompt, --tokens or --task; with --interactive and --load-session there may be none. In a
/// chat its text is the next message behind `conversation`; otherwise it is the whole text. Tokenizer and turns may
/// be null for --tokens. Throws UsageError, or std::exception for a file that cannot be read.
[[nodiscard]] Prompt make_prompt(const DecodeOptions& options, const Tokenizer* tokenizer,
                                 const Turns* turns, const std::vector<uint32_t>& conversation);

}  // namespace keyhole::tools

// A context that is longer than the model was made for runs, but its answers mean little: say so.
#pragma once

#include <cstdint>
#include <string>

#include "tools/llama/config.h"

namespace keyhole::tools {

/// What is wrong with `tokens` tokens for this model, or "" where they fit.
[[nodiscard]] std::string context_warning(const LlamaConfig& model, uint64_t tokens);

/// Shows it on stderr.
void warn_of_context(const LlamaConfig& model, uint64_t tokens);

}  // namespace keyhole::tools

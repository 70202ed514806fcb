// What runs although its answers may mean little: a context that is longer than the model was made for, and a RoPE of which not
// all is read.
#pragma once

#include <cstdint>
#include <string>

#include "tools/llama/config.h"

namespace keyhole::tools {

/// What is wrong with `tokens` tokens for this model, or "" where they fit.
[[nodiscard]] std::string context_warning(const LlamaConfig& model, uint64_t tokens);

/// What `model` says of its RoPE that is not read, or "" where all is.
[[nodiscard]] std::string rope_warning(const LlamaConfig& model);

/// Shows both on stderr.
void warn_of_context(const LlamaConfig& model, uint64_t tokens);

}  // namespace keyhole::tools

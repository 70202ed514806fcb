// Warnings for what runs although its answers may mean little: a context that is longer than the model was made for,
// and a RoPE of which some settings are not read.
#pragma once

#include <cstdint>
#include <string>

#include "tools/llama/config.h"

namespace keyhole::tools {

/// Why `tokens` tokens are too many for this model; "" where they fit.
[[nodiscard]] std::string context_warning(const LlamaConfig& model, uint64_t tokens);

/// The settings of RoPE in `model` that are not read; "" where all are.
[[nodiscard]] std::string rope_warning(const LlamaConfig& model);

/// Prints both warnings on stderr.
void warn_of_context(const LlamaConfig& model, uint64_t tokens);

}  // namespace keyhole::tools

// The text form of what the queries of a prompt attend: "type:name=value,name=value", as of an index.
#pragma once

#include <string>
#include <string_view>

#include "gpu/prompt.h"

namespace keyhole::runtime {

/// Throws Error(invalid_argument) that names what is unknown or out of range, and what is allowed.
[[nodiscard]] gpu::PromptPattern parse_prefill_pattern(std::string_view text);
/// Every type with its parameters, defaults and allowed values, for people.
[[nodiscard]] const std::string& prefill_pattern_help();

}  // namespace keyhole::runtime

// The text form of what the queries of a prompt attend: "type:name=value,name=value", as of an index.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "gpu/prompt.h"
#include "runtime/plan/config.h"

namespace keyhole::runtime {

/// Throws Error(invalid_argument) that names what is unknown or out of range, and what is allowed.
[[nodiscard]] gpu::PromptPattern parse_prefill_pattern(std::string_view text);
/// The same for each query head, of each layer in turn `[q_heads]`: a pattern for all, or "budgets:PATH", by which a
/// file of budgets (runtime/files/budgets.h) says it, and heads that it does not name are dense. Throws as
/// with_budgets(), too.
[[nodiscard]] std::vector<gpu::PromptPattern> parse_head_patterns(std::string_view text,
                                                                  const ModelShape& model);
/// Every type with its parameters, defaults and allowed values, for people.
[[nodiscard]] const std::string& prefill_pattern_help();

}  // namespace keyhole::runtime

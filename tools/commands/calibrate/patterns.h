// The patterns that calibrate tries for the prompts of each query head: every type that the library lists.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace keyhole::tools {

/// A type of patterns and the names of its parameters, as keyhole_prompt_help() lists them.
struct PatternType {
  std::string name;
  std::vector<std::string> parameters;
};
[[nodiscard]] std::vector<PatternType> pattern_types(std::string_view help);

/// The specs tried of each type where the user names none, with alternatives as in expand_sweep(): from the first
/// token on, with several values of the parameters that say how much is attended. None for `auto`, which stands for
/// another type, and "budgets", which is none.
[[nodiscard]] std::vector<std::string> default_patterns(const std::vector<PatternType>& types);

/// Expands alternatives. "dense" is the first spec whether it is given or not.
[[nodiscard]] std::vector<std::string> expand_patterns(const std::vector<std::string>& patterns);

}  // namespace keyhole::tools

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

/// What is tried of a type where nothing else is asked for, with alternatives as of expand_sweep(): from the first token on, and
/// several values of what says how much is attended. `auto` stands for another, and "budgets" is no type: nothing of these.
[[nodiscard]] std::vector<std::string> default_patterns(const std::vector<PatternType>& types);

/// The specs without alternatives, "dense" the first of them whether it is given or not.
[[nodiscard]] std::vector<std::string> expand_patterns(const std::vector<std::string>& patterns);

}  // namespace keyhole::tools

#include "tools/commands/calibrate/patterns.h"

#include <algorithm>
#include <array>

#include "tools/commands/common/attend_choice.h"
#include "tools/commands/common/sweep.h"

namespace keyhole::tools {
namespace {

/// Parameters by which a type attends more or less, and values worth trying, by rising cost.
struct Sweep {
  std::string_view parameter, values;
  bool is_of_ends =
      false;  ///< what lies first and near: not swept where another parameter says how much is attended
};
constexpr std::array kSweeps = {
    Sweep{"first", "64", true},
    Sweep{"near", "256|1024|4096", true},
    Sweep{"mass", "800|900|950|980|995"},
    Sweep{"columns", "256|1024|4096"},
    // Each is a band of blocks: a few hundred, where they lie apart, are nearly everything.
    Sweep{"slashes", "16|128"},
};

bool has(const PatternType& type, std::string_view parameter) {
  return std::find(type.parameters.begin(), type.parameters.end(), parameter) !=
         type.parameters.end();
}

std::string spec_of(const PatternType& type) {
  std::string text;
  const auto add = [&](std::string_view name, std::string_view value) {
    text += text.empty() ? ":" : ",";
    text += std::string(name) + "=" + std::string(value);
  };
  const bool says_how_much = std::any_of(kSweeps.begin(), kSweeps.end(), [&](const Sweep& s) {
    return !s.is_of_ends && has(type, s.parameter);
  });
  for (const Sweep& sweep : kSweeps) {
    if (has(type, sweep.parameter) && !(sweep.is_of_ends && says_how_much)) {
      add(sweep.parameter, sweep.values);
    }
  }
  if (has(type, "from")) add("from", "0");
  return type.name + text;
}

}  // namespace

std::vector<PatternType> pattern_types(std::string_view help) {
  std::vector<PatternType> types;
  while (!help.empty()) {
    const size_t end = std::min(help.find('\n'), help.size());
    const std::string_view line = help.substr(0, end);
    help.remove_prefix(std::min(end + 1, help.size()));
    const size_t indent = line.find_first_not_of(' ');
    if (indent == std::string_view::npos) continue;
    if (indent == 0) {
      const size_t colon = line.find(':');
      // "budgets:PATH: .." is no type.
      if (colon == std::string_view::npos || line.substr(colon + 1, 1) != " ") continue;
      types.push_back({std::string(line.substr(0, colon)), {}});
    } else if (!types.empty() && line.find('=') != std::string_view::npos) {
      types.back().parameters.emplace_back(line.substr(indent, line.find('=') - indent));
    }
  }
  return types;
}

std::vector<std::string> default_patterns(const std::vector<PatternType>& types) {
  std::vector<std::string> specs;
  for (const PatternType& type : types) {
    if (type.name != "auto") specs.push_back(spec_of(type));
  }
  return specs;
}

std::vector<std::string> expand_patterns(const std::vector<std::string>& patterns) {
  std::vector<std::string> specs = {"dense"};
  for (const std::string& pattern : patterns) {
    for (const std::string& spec : expand_sweep(pattern)) {
      if (std::find(specs.begin(), specs.end(), spec) == specs.end()) specs.push_back(spec);
    }
  }
  return specs;
}

}  // namespace keyhole::tools

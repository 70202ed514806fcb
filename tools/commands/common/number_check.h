// A check of options that take a number with a fraction.
#pragma once

#include <cmath>
#include <cstdlib>
#include <string>

#include "tools/terminal/cli.h"

namespace keyhole::tools {

/// Refuses "nan", which is within every range: CLI::Range asks whether it is less or more. allowed: for the text.
[[nodiscard]] inline CLI::Validator no_nan(const std::string& allowed) {
  return {[allowed](const std::string& text) {
            const bool is_nan = std::isnan(std::strtod(text.c_str(), nullptr));
            return is_nan ? text + " is no number, allowed: " + allowed : std::string();
          },
          ""};
}

}  // namespace keyhole::tools

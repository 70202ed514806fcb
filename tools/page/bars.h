// Bars of stacked parts, e.g. the stages of a step.
#pragma once

#include <string>
#include <vector>

namespace keyhole::tools {

struct Bars {
  struct Bar {
    std::string name;
    std::vector<double> parts;  ///< by part; NaN counts as 0
    std::string text;           ///< behind the bar, e.g. "412 us"
  };

  std::vector<std::string> parts;  ///< what the parts are
  std::string unit;                ///< of the parts, for the hover text, e.g. "us"
  std::vector<Bar> bars;
  double full = 0;  ///< what fills the width; 0: the longest bar
};

/// A legend of the parts, where there are several, and a row for each bar.
[[nodiscard]] std::string bars_html(const Bars& bars);

}  // namespace keyhole::tools

#include "tools/page/bars.h"

#include <algorithm>
#include <cmath>

#include "tools/page/curves.h"
#include "tools/page/markup.h"
#include "tools/terminal/units.h"

namespace keyhole::tools {
namespace {

constexpr double kUnits = 1000;  // of the whole width

double known(double value) { return std::isfinite(value) && value > 0 ? value : 0; }

std::string colour_class(size_t part) { return "c" + std::to_string(part % 10); }

}  // namespace

std::string bars_html(const Bars& bars) {
  double full = bars.full;
  if (full <= 0) {
    for (const Bars::Bar& bar : bars.bars) {
      double sum = 0;
      for (const double part : bar.parts) sum += known(part);
      full = std::max(full, sum);
    }
  }
  if (full <= 0) full = 1;
  std::string out = "<div class=\"bars\">\n";
  if (bars.parts.size() > 1) {
    out += "<p class=\"parts\">";
    for (size_t i = 0; i < bars.parts.size(); ++i) {
      out +=
          "<span class=\"key\"><svg class=\"swatch\" viewBox=\"0 0 12 12\" "
          "aria-hidden=\"true\"><rect class=\"part " +
          colour_class(i) + "\" width=\"12\" height=\"12\" fill=\"" + group_colour(i) +
          "\"/></svg><span>" + escaped(bars.parts[i]) + "</span></span> ";
    }
    out += "</p>\n";
  }
  for (const Bars::Bar& bar : bars.bars) {
    out += "<div class=\"bar\"><span class=\"bar-name\">" + escaped(bar.name) +
           "</span><svg class=\"plot bar-plot\" viewBox=\"0 0 1000 14\" "
           "preserveAspectRatio=\"none\" role=\"img\"" +
           attribute("aria-label", bar.name + ": " + bar.text) + ">";
    double left = 0;
    for (size_t i = 0; i < bar.parts.size(); ++i) {
      const double value = known(bar.parts[i]);
      if (value == 0) continue;
      const double width = std::min(kUnits - left, kUnits * value / full);
      out += "<rect class=\"part " + colour_class(i) + "\" x=\"" + coordinate(left) +
             "\" y=\"0\" width=\"" + coordinate(width) + "\" height=\"14\" fill=\"" +
             group_colour(i) + "\" data-value=\"" + exact_number(value) + "\"><title>" +
             escaped(bar.name) + "\n" + escaped(bars.parts[i]) + ": " + format_number(value) +
             (bars.unit.empty() ? "" : " " + escaped(bars.unit)) + "</title></rect>";
      left += width;
    }
    out += "</svg><span class=\"bar-text\">" + escaped(bar.text) + "</span></div>\n";
  }
  return out + "</div>\n";
}

}  // namespace keyhole::tools

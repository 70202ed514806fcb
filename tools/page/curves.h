// Curves: costs and quality of several ways, as panels of SVG with one legend.
//
// They are drawn here, without a library of charts. The libraries that Debian has (libjs-chart.js, libjs-dygraphs,
// libjs-jquery-flot, libjs-d3, libjs-vega; no uPlot) draw with a script in the reader's browser, most on a canvas,
// take 120 to 500 kB in every page, and show nothing where scripts are off. These panels are SVG as they stand; a
// script of a few kB adds hover and toggles.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <utility>
#include <vector>

#include "tools/page/axis.h"

namespace keyhole::tools {

struct Curves {
  /// A line, or a single point. Lines of one group have one colour, those of one kind one pattern of dashes.
  struct Series {
    size_t group = 0, kind = 0;  ///< of `groups` and `kinds`
  };
  struct Point {
    size_t series = 0;
    std::string text;  ///< what it is, e.g. "ivf:probe=16, topk:100"
  };
  /// The same points with other figures, e.g. of one head.
  struct View {
    std::string name;
    std::vector<std::vector<double>> values;  ///< by point, then quantity; NaN: unknown
  };

  std::string group_title = "Index", kind_title = "Budget";
  std::vector<std::string> groups, kinds;
  std::vector<Quantity> quantities;
  std::vector<std::pair<size_t, size_t>> panels;  ///< quantities of x and y
  std::vector<Series> series;
  std::vector<Point> points;
  std::vector<View> views;  ///< at least one: the first is drawn

  /// The series of this group and kind, which are added where they are new.
  size_t series_of(const std::string& group, const std::string& kind);
};

/// Draws every panel as a <figure> of its own, and the legend, with the data by which the page's script shows other
/// views.
[[nodiscard]] std::string curves_html(const Curves& curves);

/// Draws one SVG file: the panels, `columns` in a row, above a legend of one line for each series. Whole colours on
/// white, without style sheets.
[[nodiscard]] std::string curves_svg(const Curves& curves, const std::string& title,
                                     size_t columns);

/// The colour of a group, as a hexadecimal triple.
[[nodiscard]] const char* group_colour(size_t group);

}  // namespace keyhole::tools

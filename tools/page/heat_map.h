// Heat maps of layers and heads.
#pragma once

#include <string>
#include <vector>

#include "tools/page/axis.h"

namespace keyhole::tools {

/// One figure of every (layer, head).
struct HeatMap {
  std::string title;
  std::string field;  ///< its name in the JSON result
  std::string column_title = "KV head";
  std::vector<std::string> rows, columns;
  /// The figures by row, then column. NaN: unknown, drawn as an empty cell.
  std::vector<double> values;
  Scale scale = Scale::linear;
  double limit = 0;  ///< as Quantity::limit
  /// If not empty, values are places in this list, and cells are coloured by them.
  std::vector<std::string> names;

  /// Gives a cell a name, which is added to the list where it is new.
  void set_name(size_t cell, const std::string& name);
};

/// Draws maps side by side, each as a <figure> of its own.
[[nodiscard]] std::string heat_maps_html(const std::vector<HeatMap>& maps);

}  // namespace keyhole::tools

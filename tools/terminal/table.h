// Aligned tables for a terminal.
#pragma once

#include <string>
#include <vector>

#include "tools/terminal/style.h"

namespace keyhole::tools {

/// A table of rows under a heading, every column as wide as its widest cell. Cells may be tinted.
class Table {
 public:
  enum class Align { left, right };
  struct Column {
    std::string title;
    Align align = Align::right;
  };

  explicit Table(std::vector<Column> columns);
  /// Adds a row with one cell for each column. Throws std::invalid_argument for another number of cells.
  void add_row(std::vector<std::string> cells);
  /// The whole table, every line ending in '\n' and none in spaces.
  [[nodiscard]] std::string text(const Style& style) const;

 private:
  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace keyhole::tools

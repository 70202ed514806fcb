// Aligned tables for a terminal.
#pragma once

#include <string>
#include <vector>

#include "tools/terminal/style.h"

namespace keyhole::tools {

/// Rows under a heading, every column as wide as its widest cell. Cells may be tinted.
class Table {
 public:
  enum class Align { left, right };
  struct Column {
    std::string title;
    Align align = Align::right;
  };

  explicit Table(std::vector<Column> columns);
  /// One cell for each column. Throws std::invalid_argument for another number.
  void add_row(std::vector<std::string> cells);
  /// The whole table, every line ending in '\n' and none in spaces.
  [[nodiscard]] std::string text(const Style& style) const;

 private:
  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace keyhole::tools

#include "tools/terminal/table.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace keyhole::tools {
namespace {

constexpr const char* kGap = "  ";

void append_line(std::string& out, std::string line) {
  line.erase(line.find_last_not_of(' ') + 1);
  out += line + '\n';
}

}  // namespace

Table::Table(std::vector<Column> columns) : columns_(std::move(columns)) {}

void Table::add_row(std::vector<std::string> cells) {
  if (cells.size() != columns_.size()) {
    throw std::invalid_argument("a table of " + std::to_string(columns_.size()) +
                                " columns got a row of " + std::to_string(cells.size()));
  }
  rows_.push_back(std::move(cells));
}

std::string Table::text(const Style& style) const {
  std::vector<std::string> titles;
  std::vector<size_t> widths;
  for (size_t c = 0; c < columns_.size(); ++c) {
    titles.push_back(columns_[c].title);
    size_t width = display_width(titles.back());
    for (const auto& row : rows_) width = std::max(width, display_width(row[c]));
    widths.push_back(width);
  }

  const auto line = [&](const std::vector<std::string>& cells) {
    std::string out;
    for (size_t c = 0; c < cells.size(); ++c) {
      const std::string padding(widths[c] - display_width(cells[c]), ' ');
      if (c != 0) out += kGap;
      out += columns_[c].align == Align::left ? cells[c] + padding : padding + cells[c];
    }
    return out;
  };

  std::string out;
  for (std::string& title : titles) title = tinted(title, Tint::bold, style);
  append_line(out, line(titles));
  const std::string dash = style.unicode ? "\xe2\x94\x80" : "-";
  std::string rule;
  for (size_t c = 0; c < widths.size(); ++c) {
    if (c != 0) rule += kGap;
    for (size_t i = 0; i < widths[c]; ++i) rule += dash;
  }
  append_line(out, rule);
  for (const auto& row : rows_) append_line(out, line(row));
  return out;
}

}  // namespace keyhole::tools

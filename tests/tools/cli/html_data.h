// Reads the parts of a page that tests look at.
#pragma once

#include <regex>
#include <string>
#include <vector>

#include "runtime/files/json.h"

namespace keyhole::tools {

inline nlohmann::json json_behind(const std::string& html, const std::string& mark) {
  const size_t begin = html.find(mark);
  if (begin == std::string::npos) return nullptr;
  const size_t text = begin + mark.size();
  return nlohmann::json::parse(html.substr(text, html.find("</script>", text) - text));
}
/// The data of the page's first curves; null without any.
inline nlohmann::json curves_data(const std::string& html) {
  return json_behind(html, "class=\"curves-data\">");
}
/// The JSON result that the page carries.
inline nlohmann::json result_in_page(const std::string& html) {
  return json_behind(html, "id=\"result\">");
}

/// A point as it is drawn where no script runs.
struct DrawnPoint {
  size_t panel = 0, point = 0;
  double x = 0, y = 0;    ///< values
  double cx = 0, cy = 0;  ///< places
};
inline std::vector<DrawnPoint> drawn_points(const std::string& html) {
  const std::regex part(
      "data-panel=\"([0-9]+)\"|data-point=\"([0-9]+)\" data-x=\"([^\"]+)\" data-y=\"([^\"]+)\" "
      "cx=\"([^\"]+)\" cy=\"([^\"]+)\"");
  std::vector<DrawnPoint> out;
  size_t panel = 0;
  for (std::sregex_iterator it(html.begin(), html.end(), part), end; it != end; ++it) {
    const std::smatch& m = *it;
    if (m[1].matched) {
      panel = std::stoul(m[1]);
    } else {
      out.push_back({panel, std::stoul(m[2]), std::stod(m[3]), std::stod(m[4]), std::stod(m[5]),
                     std::stod(m[6])});
    }
  }
  return out;
}

/// The values of all parts of bars.
inline std::vector<double> drawn_bars(const std::string& html) {
  const std::regex part("<rect class=\"part [^>]* data-value=\"([^\"]+)\"");
  std::vector<double> out;
  for (std::sregex_iterator it(html.begin(), html.end(), part), end; it != end; ++it) {
    out.push_back(std::stod((*it)[1]));
  }
  return out;
}

/// The values or names of a heat map's cells, row after row.
inline std::vector<std::string> heat_cells(const std::string& html, const std::string& field) {
  const size_t begin = html.find("data-field=\"" + field + "\"");
  if (begin == std::string::npos) return {};
  const std::string map = html.substr(begin, html.find("</svg>", begin) - begin);
  const std::regex cell("data-value=\"([^\"]+)\"");
  std::vector<std::string> out;
  for (std::sregex_iterator it(map.begin(), map.end(), cell), end; it != end; ++it) {
    out.push_back((*it)[1]);
  }
  return out;
}

/// The cells of all tables' rows, with their text as it stands there.
inline std::vector<std::vector<std::string>> table_rows(const std::string& html) {
  std::vector<std::vector<std::string>> out;
  const std::regex cell("<td[^>]*>([^<]*)</td>");
  for (size_t at = 0; (at = html.find("<tr", at)) != std::string::npos; ++at) {
    const std::string row = html.substr(at, html.find("</tr>", at) - at);
    std::vector<std::string>& cells = out.emplace_back();
    for (std::sregex_iterator it(row.begin(), row.end(), cell), end; it != end; ++it) {
      cells.push_back((*it)[1]);
    }
    if (cells.empty()) out.pop_back();  // a heading
  }
  return out;
}

/// The cells of a line of CSV (RFC 4180).
inline std::vector<std::string> csv_cells(const std::string& line) {
  std::vector<std::string> out(1);
  bool quoted = false;
  for (size_t i = 0; i < line.size(); ++i) {
    if (line[i] == '"') {
      if (quoted && i + 1 < line.size() && line[i + 1] == '"') {
        out.back() += line[++i];
      } else {
        quoted = !quoted;
      }
    } else if (line[i] == ',' && !quoted) {
      out.emplace_back();
    } else {
      out.back() += line[i];
    }
  }
  return out;
}

}  // namespace keyhole::tools

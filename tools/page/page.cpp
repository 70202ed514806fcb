#include "tools/page/page.h"

#include <utility>

#include "runtime/files/json.h"
#include "tools/page/assets.h"
#include "tools/page/markup.h"

namespace keyhole::tools {

Page::Page(std::string title) : title_(std::move(title)) {}

void Page::fact(const std::string& name, const std::string& text) {
  facts_ += "<dt>" + escaped(name) + "</dt><dd>" + escaped(text) + "</dd>\n";
}

void Page::end_section() {
  if (in_section_) body_ += "</section>\n";
  in_section_ = false;
}

void Page::section(const std::string& title, const std::string& note) {
  end_section();
  body_ += "<section>\n<h2>" + escaped(title) + "</h2>\n";
  in_section_ = true;
  if (!note.empty()) paragraph(note);
}

void Page::paragraph(const std::string& text) { body_ += "<p>" + escaped(text) + "</p>\n"; }
void Page::add(const Curves& curves) { body_ += curves_html(curves); }
void Page::add(const std::vector<HeatMap>& maps) { body_ += heat_maps_html(maps); }
void Page::add(const Bars& bars) { body_ += bars_html(bars); }
void Page::verbatim(const std::string& text) {
  body_ += "<pre tabindex=\"0\">" + escaped(text) + "</pre>\n";
}

void Page::add(const PageTable& table) {
  const auto begin = [&](const char* element, size_t column) {
    return "<" + std::string(element) + (table.columns[column].text ? " class=\"text\">" : ">");
  };
  // Wider than a phone: the table scrolls by itself, by keys too.
  body_ +=
      "<div class=\"scroll\" tabindex=\"0\" role=\"region\" aria-label=\"table\"><table>\n"
      "<thead><tr>";
  for (size_t c = 0; c < table.columns.size(); ++c) {
    body_ += begin("th", c) + escaped(table.columns[c].title) + "</th>";
  }
  body_ += "</tr></thead>\n<tbody>\n";
  for (size_t r = 0; r < table.rows.size(); ++r) {
    const bool marked = r < table.marked.size() && table.marked[r];
    body_ += marked ? "<tr class=\"marked\">" : "<tr>";
    for (size_t c = 0; c < table.columns.size(); ++c) {
      body_ += begin("td", c) + escaped(table.rows[r][c]) + "</td>";
    }
    body_ += "</tr>\n";
  }
  body_ += "</tbody></table></div>\n";
}

std::string Page::html(const nlohmann::ordered_json& result) const {
  // Nothing is loaded from anywhere, whatever a name or a path in the results says.
  return "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
         "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src "
         "'unsafe-inline'; script-src 'unsafe-inline'; img-src data:\">\n"
         "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
         "<meta name=\"color-scheme\" content=\"light dark\">\n"
         "<link rel=\"icon\" href=\"data:,\">\n<title>" +
         escaped(title_) + "</title>\n<style>\n" + page_style() +
         "</style>\n</head>\n<body>\n<main>\n<h1>" + escaped(title_) +
         "</h1>\n<dl class=\"facts\">\n" + facts_ + "</dl>\n" + body_ +
         (in_section_ ? "</section>\n" : "") +
         "</main>\n<div id=\"tip\" role=\"status\" aria-live=\"polite\" hidden></div>\n"
         "<script type=\"application/json\" id=\"result\">" +
         json_in_page(result) + "</script>\n<script>\n" + page_script() +
         "</script>\n</body>\n</html>\n";
}

}  // namespace keyhole::tools

#include "tools/page/heat_map.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>

#include "tools/page/curves.h"
#include "tools/page/markup.h"
#include "tools/terminal/units.h"

namespace keyhole::tools {
namespace {

constexpr double kWidth = 420, kLeft = 46, kTop = 42, kRight = 8, kLegendHeight = 40;

struct Colour {
  double r, g, b;
};

// Matplotlib's viridis at fifths: even steps of lightness, in grey print and for colour-blind readers too.
constexpr std::array<Colour, 6> kViridis = {
    {{68, 1, 84}, {65, 68, 135}, {42, 120, 142}, {34, 168, 132}, {122, 209, 81}, {253, 231, 37}}};

Colour viridis(double place) {
  const double at = std::clamp(place, 0.0, 1.0) * static_cast<double>(kViridis.size() - 1);
  const auto low = std::min(static_cast<size_t>(at), kViridis.size() - 2);
  const double share = at - static_cast<double>(low);
  const auto between = [&](double a, double b) { return a + share * (b - a); };
  const Colour& a = kViridis[low];
  const Colour& b = kViridis[low + 1];
  return {between(a.r, b.r), between(a.g, b.g), between(a.b, b.b)};
}

std::string hexadecimal(const Colour& colour) {
  char text[16];
  std::snprintf(text, sizeof text, "#%02x%02x%02x", static_cast<unsigned>(std::lround(colour.r)),
                static_cast<unsigned>(std::lround(colour.g)),
                static_cast<unsigned>(std::lround(colour.b)));
  return text;
}

// Rec. 709's luma decides which text is read on it.
bool is_light(const Colour& c) { return 0.2126 * c.r + 0.7152 * c.g + 0.0722 * c.b > 120; }

class Map {
 public:
  explicit Map(const HeatMap& map)
      : map_(map),
        axis_({map.field, map.title, map.scale, map.limit}, map.values),
        cell_width_((kWidth - kLeft - kRight) / static_cast<double>(map.columns.size())),
        cell_height_(map.rows.size() > 16 ? 14 : 24),
        texts_fit_(cell_height_ >= 20 && longest_text() <= cell_width_) {}

  [[nodiscard]] std::string html() const {
    const double bottom = kTop + cell_height_ * static_cast<double>(map_.rows.size());
    const double legend =
        map_.names.empty() ? kLegendHeight : 12 + 17.0 * static_cast<double>(map_.names.size());
    const double height = bottom + legend;
    std::string out = "<figure class=\"panel heat\"><svg class=\"plot\" viewBox=\"0 0 " +
                      coordinate(kWidth) + " " + coordinate(height) + "\" role=\"img\"" +
                      attribute("aria-label", map_.title) + attribute("data-field", map_.field) +
                      ">\n";
    out += text(10, 17, map_.title, "start", " font-weight=\"bold\"");
    out += text(kLeft - 6, kTop - 5, "layer", "end", "");
    headings(out);
    for (size_t r = 0; r < map_.rows.size(); ++r) {
      for (size_t c = 0; c < map_.columns.size(); ++c) cell(out, r, c);
    }
    map_.names.empty() ? gradient(out, bottom) : name_list(out, bottom);
    return out + "</svg></figure>\n";
  }

 private:
  static std::string text(double x, double y, const std::string& content, const char* anchor,
                          const std::string& more) {
    return "<text x=\"" + coordinate(x) + "\" y=\"" + coordinate(y) + "\" text-anchor=\"" + anchor +
           "\"" + more + ">" + escaped(content) + "</text>\n";
  }
  static std::string rectangle(double x, double y, double width, double height,
                               const std::string& more) {
    return "<rect x=\"" + coordinate(x) + "\" y=\"" + coordinate(y) + "\" width=\"" +
           coordinate(width) + "\" height=\"" + coordinate(height) + "\"" + more;
  }

  // Names of rows and columns, as many as there is room for.
  void headings(std::string& out) const {
    const size_t every_row = map_.rows.size() > 48 ? 4 : 1;
    for (size_t r = 0; r < map_.rows.size(); r += every_row) {
      out += text(kLeft - 6, kTop + cell_height_ * (static_cast<double>(r) + 0.5) + 4, map_.rows[r],
                  "end", "");
    }
    const auto every_column = static_cast<size_t>(std::ceil(20 / cell_width_));
    for (size_t c = 0; c < map_.columns.size(); c += every_column) {
      out += text(kLeft + cell_width_ * (static_cast<double>(c) + 0.5), kTop - 5, map_.columns[c],
                  "middle", "");
    }
    out += text(kWidth - kRight, kTop - 20, map_.column_title, "end", "");
  }

  /// Width of the longest value with some air, in units: digits of 12 units take some 7.5 in any usual typeface.
  [[nodiscard]] double longest_text() const {
    size_t longest = 0;
    for (const double value : map_.values) {
      if (std::isfinite(value)) longest = std::max(longest, value_text(value).size());
    }
    return 7.5 * static_cast<double>(longest) + 4;
  }

  [[nodiscard]] std::string value_text(double value) const {
    if (!map_.names.empty()) return map_.names[static_cast<size_t>(value)];
    return format_number(value);
  }

  void cell(std::string& out, size_t r, size_t c) const {
    const double value = map_.values[r * map_.columns.size() + c];
    const double x = kLeft + cell_width_ * static_cast<double>(c);
    const double y = kTop + cell_height_ * static_cast<double>(r);
    const std::string where =
        "layer " + map_.rows[r] + ", " + map_.column_title + " " + map_.columns[c];
    const bool known = std::isfinite(value) && (!map_.names.empty() || axis_.shows(value));
    if (!known) {
      out += rectangle(x, y, cell_width_, cell_height_, " class=\"cell unknown\" fill=\"none\" ") +
             "stroke=\"#888888\"><title>" + escaped(where) + "\nnot known</title></rect>\n";
      return;
    }
    const bool named = !map_.names.empty();
    const Colour colour = viridis(named ? 0 : axis_.place(value));
    out += rectangle(x, y, cell_width_, cell_height_,
                     named ? " class=\"cell named c" +
                                 std::to_string(static_cast<size_t>(value) % 10) + "\" fill=\"" +
                                 group_colour(static_cast<size_t>(value)) + "\""
                           : " class=\"cell\" fill=\"" + hexadecimal(colour) + "\"") +
           " data-value=\"" + (named ? escaped(value_text(value)) : exact_number(value)) +
           "\"><title>" + escaped(where) + "\n" + escaped(map_.title) + ": " +
           escaped(value_text(value)) + "</title></rect>\n";
    if (!named && texts_fit_) {
      out += "<text class=\"" + std::string(is_light(colour) ? "on-light" : "on-dark") + "\" x=\"" +
             coordinate(x + cell_width_ / 2) + "\" y=\"" + coordinate(y + cell_height_ / 2 + 4) +
             "\" text-anchor=\"middle\" fill=\"" + (is_light(colour) ? "#111111" : "#ffffff") +
             "\">" + escaped(format_number(value)) + "</text>\n";
    }
  }

  void gradient(std::string& out, double top) const {
    constexpr int kSteps = 48;
    const double width = (kWidth - kLeft - kRight) / kSteps;
    for (int i = 0; i < kSteps; ++i) {
      out += rectangle(kLeft + i * width, top + 10, width + 0.5, 8,
                       " fill=\"" + hexadecimal(viridis((i + 0.5) / kSteps)) + "\"/>\n");
    }
    for (const Axis::Tick& tick : axis_.ticks()) {
      const double x = kLeft + tick.place * (kWidth - kLeft - kRight);
      out += text(tick_middle(x, tick.text, kWidth), top + 32, tick.text, "middle", "");
    }
  }

  void name_list(std::string& out, double top) const {
    for (size_t i = 0; i < map_.names.size(); ++i) {
      const double y = top + 10 + 17 * static_cast<double>(i);
      out += rectangle(kLeft, y, 12, 12,
                       " class=\"cell named c" + std::to_string(i % 10) + "\" fill=\"" +
                           group_colour(i) + "\"/>\n");
      // What is longer than the picture is wide: the cells' own text has the whole name.
      constexpr size_t kLongest = 58;
      const std::string& name = map_.names[i];
      out +=
          text(kLeft + 18, y + 10,
               name.size() <= kLongest ? name : name.substr(0, kLongest - 3) + "...", "start", "");
    }
  }

  const HeatMap& map_;
  Axis axis_;
  double cell_width_, cell_height_;
  bool texts_fit_;  // all values into their cells
};

}  // namespace

void HeatMap::set_name(size_t cell, const std::string& name) {
  const auto at = std::find(names.begin(), names.end(), name);
  values[cell] = static_cast<double>(at - names.begin());
  if (at == names.end()) names.push_back(name);
}

std::string heat_maps_html(const std::vector<HeatMap>& maps) {
  std::string out = "<div class=\"panels\">\n";
  for (const HeatMap& map : maps) {
    if (!map.rows.empty() && !map.columns.empty()) out += Map(map).html();
  }
  return out + "</div>\n";
}

}  // namespace keyhole::tools

#include "tools/commands/compare/svg.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <limits>
#include <utility>

namespace keyhole::tools {
namespace {

struct Series {
  std::string name;
  std::string colour;
  std::string dashes;
  std::vector<const Measurement*> points;
};

// Okabe and Ito's palette, told apart by colour-blind readers too, without its yellow; then darker tones.
constexpr std::array kColours = {"#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9",
                                 "#e69f00", "#333333", "#7b3f00", "#5f3dc4", "#2b8a3e"};
// Budgets are told apart by their dashes.
constexpr std::array kDashes = {"none", "7 3", "2 3", "9 3 2 3", "4 2", "1 2"};

constexpr double kPanelWidth = 430, kPanelHeight = 230;
constexpr double kLeft = 62, kTop = 40, kGapX = 70, kGapY = 56;
constexpr double kLegendLine = 17;

std::string number(double x) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f", x);
  return text;
}

std::string tick_text(double x) {
  char text[32];
  std::snprintf(text, sizeof text, "%.4g", x);
  return text;
}

std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '&': out += "&amp;"; break;
      case '"': out += "&quot;"; break;
      default: out += c;
    }
  }
  return out;
}

/// One axis: data to [0, 1], and where its ticks are.
class Axis {
 public:
  Axis(std::vector<double> values, bool logarithmic) : logarithmic_(logarithmic) {
    std::erase_if(values, [&](double v) { return !std::isfinite(v) || (logarithmic && v <= 0); });
    if (values.empty()) values = {logarithmic ? 0.1 : 0.0, 1.0};
    const auto [least, most] = std::minmax_element(values.begin(), values.end());
    low_ = to_scale(*least);
    high_ = to_scale(*most);
    const double margin = std::max(0.04 * (high_ - low_), logarithmic ? 0.02 : 0.002);
    low_ -= margin;
    high_ += margin;
  }

  [[nodiscard]] bool has(double v) const { return std::isfinite(v) && (!logarithmic_ || v > 0); }
  [[nodiscard]] double place(double v) const { return (to_scale(v) - low_) / (high_ - low_); }

  [[nodiscard]] std::vector<double> ticks() const {
    std::vector<double> out;
    if (logarithmic_) {
      // 1, 2, 5 of each decade; over more than two decades the decades alone.
      const bool wide = high_ - low_ > 2;
      for (double decade = std::floor(low_); decade <= high_; ++decade) {
        for (const double step : {1.0, 2.0, 5.0}) {
          const double v = step * std::pow(10.0, decade);
          if ((step == 1.0 || !wide) && to_scale(v) >= low_ && to_scale(v) <= high_) {
            out.push_back(v);
          }
        }
      }
      return out;
    }
    const double rough = (high_ - low_) / 5;
    const double decade = std::pow(10.0, std::floor(std::log10(rough)));
    double step = decade;
    for (const double s : {2.0, 5.0, 10.0}) {
      if (step < rough) step = s * decade;
    }
    for (double v = std::ceil(low_ / step) * step; v <= high_; v += step) {
      out.push_back(std::fabs(v) < step / 1000 ? 0.0 : v);
    }
    return out;
  }

 private:
  [[nodiscard]] double to_scale(double v) const { return logarithmic_ ? std::log10(v) : v; }

  bool logarithmic_;
  double low_, high_;
};

/// A figure that an axis shows.
struct Figure {
  std::string label;
  bool logarithmic;
  double (*of)(const Measurement&);
};

// "topk:100, tail second:16, error=0.05".
std::string way_text(const Measurement& m) {
  std::string text = m.attend;
  if (m.tail != "none") text += ", tail " + m.tail;
  if (m.target != "none") text += ", " + m.target;
  return text;
}

std::vector<Series> series_of(const std::vector<Summary>& summaries) {
  std::vector<Series> out;
  std::vector<std::string> indexes, ways;
  const auto place_in = [](std::vector<std::string>& list, const std::string& item) {
    const auto at = std::find(list.begin(), list.end(), item);
    const auto place = static_cast<size_t>(at - list.begin());
    if (at == list.end()) list.push_back(item);
    return place;
  };
  for (const Summary& s : summaries) {
    const std::string way = way_text(s.mean);
    const std::string name = s.mean.series + ", " + way;
    auto at = std::find_if(out.begin(), out.end(), [&](const Series& o) { return o.name == name; });
    if (at == out.end()) {
      const size_t index = place_in(indexes, s.mean.series);
      const size_t dashes = place_in(ways, way);
      out.push_back(
          {name, kColours[index % kColours.size()], kDashes[dashes % kDashes.size()], {}});
      at = out.end() - 1;
    }
    at->points.push_back(&s.mean);
  }
  return out;
}

class Picture {
 public:
  void text(double x, double y, const std::string& content, const char* anchor,
            const std::string& more = "") {
    body_ += "<text x=\"" + number(x) + "\" y=\"" + number(y) + "\" text-anchor=\"" + anchor +
             "\"" + more + ">" + escaped(content) + "</text>\n";
  }
  void line(double x1, double y1, double x2, double y2, const std::string& style) {
    body_ += "<line x1=\"" + number(x1) + "\" y1=\"" + number(y1) + "\" x2=\"" + number(x2) +
             "\" y2=\"" + number(y2) + "\" " + style + "/>\n";
  }

  void panel(double left, double top, const std::vector<Series>& all, const Figure& fx,
             const Figure& fy) {
    std::vector<double> xs, ys;
    for (const Series& s : all) {
      for (const Measurement* m : s.points) {
        xs.push_back(fx.of(*m));
        ys.push_back(fy.of(*m));
      }
    }
    const Axis x(std::move(xs), fx.logarithmic);
    const Axis y(std::move(ys), fy.logarithmic);
    const double bottom = top + kPanelHeight;
    const auto at_x = [&](double v) { return left + x.place(v) * kPanelWidth; };
    const auto at_y = [&](double v) { return bottom - y.place(v) * kPanelHeight; };
    for (const double v : x.ticks()) {
      line(at_x(v), top, at_x(v), bottom, "stroke=\"#e4e4e4\"");
      text(at_x(v), bottom + 15, tick_text(v), "middle");
    }
    for (const double v : y.ticks()) {
      line(left, at_y(v), left + kPanelWidth, at_y(v), "stroke=\"#e4e4e4\"");
      text(left - 6, at_y(v) + 4, tick_text(v), "end");
    }
    body_ += "<rect x=\"" + number(left) + "\" y=\"" + number(top) + "\" width=\"" +
             number(kPanelWidth) + "\" height=\"" + number(kPanelHeight) +
             "\" fill=\"none\" stroke=\"#888\"/>\n";
    text(left + kPanelWidth / 2, bottom + 32, fx.label, "middle");
    text(left, top - 7, fy.label, "start", " font-weight=\"bold\"");
    for (const Series& s : all) {
      std::vector<std::pair<double, const Measurement*>> points;
      for (const Measurement* m : s.points) {
        if (x.has(fx.of(*m)) && y.has(fy.of(*m))) points.emplace_back(at_x(fx.of(*m)), m);
      }
      std::stable_sort(points.begin(), points.end(),
                       [](const auto& a, const auto& b) { return a.first < b.first; });
      std::string path;
      for (const auto& [px, m] : points) {
        path += (path.empty() ? "" : " ") + number(px) + "," + number(at_y(fy.of(*m)));
      }
      if (points.size() > 1) {
        body_ += "<polyline points=\"" + path + "\" fill=\"none\" stroke=\"" + s.colour +
                 "\" stroke-width=\"1.8\" stroke-dasharray=\"" + s.dashes + "\"/>\n";
      }
      for (const auto& [px, m] : points) {
        body_ += "<circle cx=\"" + number(px) + "\" cy=\"" + number(at_y(fy.of(*m))) +
                 "\" r=\"3.2\" fill=\"" + s.colour + "\"><title>" +
                 escaped(m->index + ", " + way_text(*m)) + "</title></circle>\n";
      }
    }
  }

  void legend(double left, double top, const std::vector<Series>& all) {
    for (const Series& s : all) {
      line(
          left, top, left + 30, top,
          "stroke=\"" + s.colour + "\" stroke-width=\"1.8\" stroke-dasharray=\"" + s.dashes + "\"");
      body_ += "<circle cx=\"" + number(left + 15) + "\" cy=\"" + number(top) +
               "\" r=\"3.2\" fill=\"" + s.colour + "\"/>\n";
      text(left + 38, top + 4, s.name, "start");
      top += kLegendLine;
    }
  }

  [[nodiscard]] std::string finish(double width, double height) const {
    return "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"" + number(width) + "\" height=\"" +
           number(height) + "\" viewBox=\"0 0 " + number(width) + " " + number(height) +
           "\" font-family=\"sans-serif\" font-size=\"11\" fill=\"#222\">\n"
           "<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n" +
           body_ + "</svg>\n";
  }

 private:
  std::string body_;
};

}  // namespace

std::string to_svg(const std::vector<Summary>& summaries, const std::string& title,
                   size_t recall_k) {
  const std::vector<Series> all = series_of(summaries);
  const std::array columns = {Figure{"read by a step, % of the offloaded keys and values", true,
                                     [](const Measurement& m) { return 100 * m.read_share; }},
                              Figure{"median latency of one group's search and attention, us", true,
                                     [](const Measurement& m) { return m.latency_us.p50; }}};
  std::vector<Figure> rows;
  if (std::any_of(summaries.begin(), summaries.end(),
                  [](const Summary& s) { return s.mean.output_error.has_value(); })) {
    // An exact scan's 1e-7 would press all other lines together.
    rows.push_back(
        {"output error, median (below 0.001 drawn there)", true, [](const Measurement& m) {
           return m.output_error ? std::max(m.output_error->median, 1e-3)
                                 : std::numeric_limits<double>::quiet_NaN();
         }});
  } else {
    rows.push_back({"recall@" + std::to_string(recall_k), false,
                    [](const Measurement& m) { return m.recall; }});
  }
  Picture picture;
  picture.text(kLeft, 18, title, "start", " font-size=\"13\"");
  double top = kTop;
  for (const Figure& row : rows) {
    double left = kLeft;
    for (const Figure& column : columns) {
      picture.panel(left, top, all, column, row);
      left += kPanelWidth + kGapX;
    }
    top += kPanelHeight + kGapY;
  }
  picture.legend(kLeft, top, all);
  return picture.finish(kLeft + 2 * kPanelWidth + kGapX + 20,
                        top + static_cast<double>(all.size()) * kLegendLine + 6);
}

}  // namespace keyhole::tools

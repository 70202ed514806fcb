#include "tools/page/curves.h"

#include <algorithm>
#include <array>

#include "runtime/files/json.h"
#include "tools/page/front.h"
#include "tools/page/markup.h"

namespace keyhole::tools {
namespace {

using nlohmann::ordered_json;

// Okabe and Ito's palette, told apart by colour-blind readers too, without its yellow; then darker tones.
constexpr std::array kColours = {"#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9",
                                 "#e69f00", "#333333", "#7b3f00", "#5f3dc4", "#2b8a3e"};
constexpr std::array kDashes = {"none", "7 3", "2 3", "9 3 2 3", "4 2", "1 2"};

// A panel, in units of its SVG; wide enough for a phone's 390 pixels without its text becoming too small to read.
constexpr double kPanelWidth = 420, kPanelHeight = 300;
constexpr double kPlotLeft = 58, kPlotTop = 26, kPlotWidth = 346, kPlotHeight = 226;
constexpr double kLegendLine = 17;

const char* dashes_of(size_t kind) { return kDashes[kind % kDashes.size()]; }

std::string text_at(double x, double y, const std::string& content, const char* anchor,
                    const std::string& more = "") {
  return "<text x=\"" + coordinate(x) + "\" y=\"" + coordinate(y) + "\" text-anchor=\"" + anchor +
         "\"" + more + ">" + escaped(content) + "</text>\n";
}

std::string line_from(double x1, double y1, double x2, double y2, const std::string& more) {
  return "<line x1=\"" + coordinate(x1) + "\" y1=\"" + coordinate(y1) + "\" x2=\"" +
         coordinate(x2) + "\" y2=\"" + coordinate(y2) + "\"" + more + "/>\n";
}

// One panel of one view: where its points lie.
class Panel {
 public:
  Panel(const Curves& curves, const Curves::View& view, std::pair<size_t, size_t> quantities)
      : curves_(curves),
        view_(view),
        x_(quantities.first),
        y_(quantities.second),
        x_axis_(curves.quantities[x_], column(x_)),
        y_axis_(curves.quantities[y_], column(y_)) {}

  [[nodiscard]] std::string svg() const { return grid() + series(); }
  [[nodiscard]] ordered_json axes() const { return {x_axis_.to_json(), y_axis_.to_json()}; }
  [[nodiscard]] std::string title() const {
    return curves_.quantities[y_].label + " against " + curves_.quantities[x_].label;
  }

  [[nodiscard]] std::vector<bool> front() const {
    std::vector<double> costs = column(x_);
    std::vector<double> losses = column(y_);
    if (curves_.quantities[x_].more_is_better) negate(costs);
    if (curves_.quantities[y_].more_is_better) negate(losses);
    return pareto_front(costs, losses);
  }

 private:
  static void negate(std::vector<double>& values) {
    for (double& value : values) value = -value;
  }
  [[nodiscard]] std::vector<double> column(size_t quantity) const {
    std::vector<double> out;
    for (const auto& figures : view_.values) out.push_back(figures[quantity]);
    return out;
  }
  [[nodiscard]] bool shown(size_t point) const {
    return x_axis_.shows(view_.values[point][x_]) && y_axis_.shows(view_.values[point][y_]);
  }
  [[nodiscard]] double left_of(size_t point) const {
    return kPlotLeft + x_axis_.place(view_.values[point][x_]) * kPlotWidth;
  }
  [[nodiscard]] double top_of(size_t point) const {
    return kPlotTop + (1 - y_axis_.place(view_.values[point][y_])) * kPlotHeight;
  }

  [[nodiscard]] std::string grid() const {
    const double bottom = kPlotTop + kPlotHeight;
    const std::string light = " stroke=\"#e4e4e4\"";
    std::string out = "<g class=\"grid\">\n";
    for (const Axis::Tick& tick : x_axis_.ticks()) {
      const double x = kPlotLeft + tick.place * kPlotWidth;
      out += line_from(x, kPlotTop, x, bottom, light) +
             text_at(tick_middle(x, tick.text, kPanelWidth), bottom + 15, tick.text, "middle");
    }
    for (const Axis::Tick& tick : y_axis_.ticks()) {
      const double y = bottom - tick.place * kPlotHeight;
      out += line_from(kPlotLeft, y, kPlotLeft + kPlotWidth, y, light) +
             text_at(kPlotLeft - 6, y + 4, tick.text, "end");
    }
    out += "</g>\n<rect class=\"frame\" x=\"" + coordinate(kPlotLeft) + "\" y=\"" +
           coordinate(kPlotTop) + "\" width=\"" + coordinate(kPlotWidth) + "\" height=\"" +
           coordinate(kPlotHeight) + "\" fill=\"none\" stroke=\"#888888\"/>\n";
    out += text_at(kPlotLeft + kPlotWidth / 2, bottom + 34, curves_.quantities[x_].label, "middle");
    out +=
        text_at(10, kPlotTop - 9, curves_.quantities[y_].label, "start", " font-weight=\"bold\"");
    return out;
  }

  [[nodiscard]] std::string series() const {
    const std::vector<bool> best = front();
    std::string out;
    for (size_t s = 0; s < curves_.series.size(); ++s) {
      std::vector<size_t> points;
      for (size_t p = 0; p < curves_.points.size(); ++p) {
        if (curves_.points[p].series == s && shown(p)) points.push_back(p);
      }
      std::stable_sort(points.begin(), points.end(),
                       [&](size_t a, size_t b) { return left_of(a) < left_of(b); });
      const auto [group, kind] = curves_.series[s];
      const std::string colour = group_colour(group);
      out += "<g class=\"series c" + std::to_string(group % kColours.size()) + "\" data-series=\"" +
             std::to_string(s) + "\">\n";
      std::string path;
      for (const size_t p : points) {
        path += (path.empty() ? "" : " ") + coordinate(left_of(p)) + "," + coordinate(top_of(p));
      }
      if (points.size() > 1) {
        out += "<polyline points=\"" + path + "\" fill=\"none\" stroke=\"" + colour +
               "\" stroke-width=\"1.6\" stroke-dasharray=\"" + dashes_of(kind) + "\"/>\n";
      }
      for (const size_t p : points) out += circle(p, colour, best[p]);
      out += "</g>\n";
    }
    return out;
  }

  [[nodiscard]] std::string circle(size_t p, const std::string& colour, bool best) const {
    const double x = view_.values[p][x_];
    const double y = view_.values[p][y_];
    return "<circle class=\"point" + std::string(best ? " front" : "") + "\" data-point=\"" +
           std::to_string(p) + "\" data-x=\"" + exact_number(x) + "\" data-y=\"" + exact_number(y) +
           "\" cx=\"" + coordinate(left_of(p)) + "\" cy=\"" + coordinate(top_of(p)) + "\" r=\"" +
           (best ? "4.4" : "2.8") + "\" fill=\"" + colour + "\"><title>" +
           escaped(curves_.points[p].text) + "\n" + escaped(curves_.quantities[x_].label) + ": " +
           tick_text(x) + "\n" + escaped(curves_.quantities[y_].label) + ": " + tick_text(y) +
           "</title></circle>\n";
  }

  const Curves& curves_;
  const Curves::View& view_;
  size_t x_, y_;
  Axis x_axis_, y_axis_;
};

// What the script needs to draw another view.
ordered_json script_data(const Curves& curves) {
  ordered_json quantities = ordered_json::array();
  for (const Quantity& q : curves.quantities) {
    quantities.push_back({{"field", q.field}, {"label", q.label}});
  }
  ordered_json series = ordered_json::array();
  for (const Curves::Series& s : curves.series) series.push_back({s.group, s.kind});
  ordered_json points = ordered_json::array();
  for (const Curves::Point& p : curves.points) points.push_back({p.series, p.text});
  ordered_json views = ordered_json::array();
  for (const Curves::View& view : curves.views) {
    ordered_json axes = ordered_json::array();
    ordered_json fronts = ordered_json::array();
    for (const auto& quantities_of_panel : curves.panels) {
      const Panel panel(curves, view, quantities_of_panel);
      axes.push_back(panel.axes());
      ordered_json best = ordered_json::array();
      const std::vector<bool> front = panel.front();
      for (size_t p = 0; p < front.size(); ++p) {
        if (front[p]) best.push_back(p);
      }
      fronts.push_back(best);
    }
    views.push_back(
        {{"name", view.name}, {"values", view.values}, {"axes", axes}, {"fronts", fronts}});
  }
  return {{"plot", {kPlotLeft, kPlotTop, kPlotWidth, kPlotHeight}},
          {"width", kPanelWidth},
          {"quantities", quantities},
          {"panels", curves.panels},
          {"series", series},
          {"points", points},
          {"views", views}};
}

std::string swatch(const std::string& colour_class, const std::string& colour,
                   const std::string& dashes) {
  return "<svg class=\"swatch " + colour_class +
         "\" viewBox=\"0 0 30 10\" aria-hidden=\"true\"><line x1=\"0\" y1=\"5\" x2=\"30\" y2=\"5\" "
         "stroke=\"" +
         colour + "\" stroke-width=\"3\" stroke-dasharray=\"" + dashes + "\"/></svg>";
}

std::string keys(const std::string& title, const char* what, const std::vector<std::string>& names,
                 bool coloured) {
  std::string out = "<fieldset data-toggles=\"" + std::string(what) + "\"><legend>" +
                    escaped(title) + "</legend>\n";
  for (size_t i = 0; i < names.size(); ++i) {
    out += "<label class=\"key\" data-value=\"" + std::to_string(i) + "\">" +
           (coloured ? swatch("c" + std::to_string(i % kColours.size()), group_colour(i), "none")
                     : swatch("plain", "#888888", dashes_of(i))) +
           "<span>" + escaped(names[i]) + "</span></label>\n";
  }
  return out + "</fieldset>\n";
}

}  // namespace

const char* group_colour(size_t group) { return kColours[group % kColours.size()]; }

size_t Curves::series_of(const std::string& group, const std::string& kind) {
  const auto place_in = [](std::vector<std::string>& list, const std::string& item) {
    const auto at = std::find(list.begin(), list.end(), item);
    const auto place = static_cast<size_t>(at - list.begin());
    if (at == list.end()) list.push_back(item);
    return place;
  };
  const size_t g = place_in(groups, group);
  const size_t k = place_in(kinds, kind);
  const auto at = std::find_if(series.begin(), series.end(),
                               [&](const Series& s) { return s.group == g && s.kind == k; });
  const auto place = static_cast<size_t>(at - series.begin());
  if (at == series.end()) series.push_back({g, k});
  return place;
}

std::string curves_html(const Curves& curves) {
  std::string out = "<div class=\"curves\">\n<div class=\"keys\">\n" +
                    keys(curves.group_title, "group", curves.groups, true);
  if (curves.kinds.size() > 1) out += keys(curves.kind_title, "kind", curves.kinds, false);
  out += "</div>\n<div class=\"panels\">\n";
  for (size_t i = 0; i < curves.panels.size(); ++i) {
    const Panel panel(curves, curves.views.front(), curves.panels[i]);
    out += "<figure class=\"panel\"><svg class=\"plot\" viewBox=\"0 0 " + coordinate(kPanelWidth) +
           " " + coordinate(kPanelHeight) + "\" role=\"img\" data-panel=\"" + std::to_string(i) +
           "\"" + attribute("aria-label", panel.title()) + ">\n" + panel.svg() +
           "</svg></figure>\n";
  }
  return out +
         "</div>\n<p class=\"note\">Large points: nothing else costs less and is worth more "
         "(Pareto front of the panel).</p>\n<script type=\"application/json\" "
         "class=\"curves-data\">" +
         json_in_page(script_data(curves)) + "</script>\n</div>\n";
}

std::string curves_svg(const Curves& curves, const std::string& title, size_t columns) {
  constexpr double kHeading = 24, kGap = 16;
  const size_t rows = (curves.panels.size() + columns - 1) / columns;
  std::string body = text_at(10, 18, title, "start", " font-size=\"13\"");
  for (size_t i = 0; i < curves.panels.size(); ++i) {
    const double left = static_cast<double>(i % columns) * (kPanelWidth + kGap);
    const double top = kHeading + static_cast<double>(i / columns) * (kPanelHeight + kGap);
    body += "<g transform=\"translate(" + coordinate(left) + " " + coordinate(top) + ")\">\n" +
            Panel(curves, curves.views.front(), curves.panels[i]).svg() + "</g>\n";
  }
  double top = kHeading + static_cast<double>(rows) * (kPanelHeight + kGap);
  for (size_t i = 0; i < curves.series.size(); ++i) {
    const auto [group, kind] = curves.series[i];
    const double left = kPlotLeft + static_cast<double>(i % columns) * (kPanelWidth + kGap);
    const std::string colour = group_colour(group);
    body += line_from(left, top, left + 30, top,
                      " stroke=\"" + colour + "\" stroke-width=\"1.8\" stroke-dasharray=\"" +
                          dashes_of(kind) + "\"");
    body += "<circle cx=\"" + coordinate(left + 15) + "\" cy=\"" + coordinate(top) +
            "\" r=\"3.2\" fill=\"" + colour + "\"/>\n";
    const std::string& way = curves.kinds[kind];
    body += text_at(left + 38, top + 4, curves.groups[group] + (way.empty() ? "" : ", " + way),
                    "start");
    if (i % columns + 1 == columns || i + 1 == curves.series.size()) top += kLegendLine;
  }
  const std::string width = coordinate(static_cast<double>(columns) * (kPanelWidth + kGap));
  const std::string height = coordinate(top + 6);
  return "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"" + width + "\" height=\"" + height +
         "\" viewBox=\"0 0 " + width + " " + height +
         "\" font-family=\"sans-serif\" font-size=\"11\" fill=\"#222222\">\n"
         "<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n" +
         body + "</svg>\n";
}

}  // namespace keyhole::tools

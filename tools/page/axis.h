// Axes of charts: where a value lies, and where the ticks are.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

namespace keyhole::tools {

/// nines: the logarithm of 1 - value, for shares whose distance from 1 counts (0.9, 0.99, 0.999).
enum class Scale { linear, log, nines };

/// What an axis shows.
struct Quantity {
  std::string field;  ///< its name in the JSON result, e.g. "latency_us.p50"
  std::string label;  ///< of the axis, with the unit
  Scale scale = Scale::linear;
  /// log: values below are drawn there (0: they are not drawn); nines: values above 1 - limit likewise. An exact scan's
  /// error of 1e-7 would else press all other points together.
  double limit = 0;
  bool more_is_better = false;
};

class Axis {
 public:
  struct Tick {
    double place;  ///< 0..1
    std::string text;
  };

  /// Covers those of `values` that it can show, with a small margin.
  Axis(const Quantity& quantity, const std::vector<double>& values);

  /// Whether a value can be shown: it is finite, and has a logarithm where one is taken.
  [[nodiscard]] bool shows(double value) const;
  /// 0 at the low end, 1 at the high one. Of a value that is shown.
  [[nodiscard]] double place(double value) const;
  /// In growing order, not too many for 360 units of width.
  [[nodiscard]] std::vector<Tick> ticks() const;

  /// What a script needs to place other values: scale, limit, low and high end in the scale's own unit, ticks.
  [[nodiscard]] nlohmann::ordered_json to_json() const;

 private:
  [[nodiscard]] double to_scale(double value) const;

  Scale scale_;
  double limit_;
  double low_, high_;
};

/// "0.05", "20k", "3M": short enough for a tick.
[[nodiscard]] std::string tick_text(double value);

/// Where the middle of a tick's text lies that belongs at `x`: so far left that it ends within `width`.
[[nodiscard]] double tick_middle(double x, const std::string& text, double width);

}  // namespace keyhole::tools

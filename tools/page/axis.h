// Axes of charts: the places of values and of ticks.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

namespace keyhole::tools {

/// The scale of an axis. nines: the logarithm of 1 - value, for shares whose distance from 1 counts (0.9, 0.99,
/// 0.999).
enum class Scale { linear, log, nines };

/// The quantity that an axis shows.
struct Quantity {
  std::string field;  ///< its name in the JSON result, e.g. "latency_us.p50"
  std::string label;  ///< of the axis, with the unit
  Scale scale = Scale::linear;
  /// log: values below the limit are drawn at it (0: they are not drawn); nines: values above 1 - limit likewise.
  /// Otherwise an exact scan's error of 1e-7 would press all other points together.
  double limit = 0;
  bool more_is_better = false;
};

class Axis {
 public:
  struct Tick {
    double place;  ///< 0..1
    std::string text;
  };

  /// An axis that covers those of `values` that it can show, with a small margin.
  Axis(const Quantity& quantity, const std::vector<double>& values);

  /// Whether a value can be shown: it is finite, and has a logarithm where one is taken.
  [[nodiscard]] bool shows(double value) const;
  /// The place of a value that is shown: 0 at the low end, 1 at the high one.
  [[nodiscard]] double place(double value) const;
  /// The ticks in growing order, not too many for 360 units of width.
  [[nodiscard]] std::vector<Tick> ticks() const;

  /// The data with which a script places other values: scale, limit, low and high end in the scale's own unit, ticks.
  [[nodiscard]] nlohmann::ordered_json to_json() const;

 private:
  [[nodiscard]] double to_scale(double value) const;

  Scale scale_;
  double limit_;
  double low_, high_;
};

/// A number short enough for a tick: "0.05", "20k", "3M".
[[nodiscard]] std::string tick_text(double value);

/// The place for the middle of a tick's text that belongs at `x`, moved left where the text would not end within
/// `width`.
[[nodiscard]] double tick_middle(double x, const std::string& text, double width);

}  // namespace keyhole::tools

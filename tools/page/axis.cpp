#include "tools/page/axis.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>

#include "runtime/files/json.h"

namespace keyhole::tools {
namespace {

// Ticks of a linear axis at 1, 2 or 5 times a power of ten.
std::vector<double> round_values(double low, double high) {
  const double rough = (high - low) / 5;
  const double decade = std::pow(10.0, std::floor(std::log10(rough)));
  double step = decade;
  for (const double s : {2.0, 5.0, 10.0}) {
    if (step < rough) step = s * decade;
  }
  std::vector<double> out;
  const auto first = static_cast<int64_t>(std::ceil(low / step));
  for (int64_t i = first; static_cast<double>(i) * step <= high; ++i) {
    out.push_back(static_cast<double>(i) * step);
  }
  return out;
}

// 1, 2, 5 of each decade, and over more than two decades the decades alone: exponents of ten in [low, high].
std::vector<double> round_exponents(double low, double high) {
  const bool wide = high - low > 2;
  const double every = std::max(1.0, std::ceil((high - low) / 7));
  std::vector<double> out;
  for (double decade = std::floor(low); decade <= high; ++decade) {
    for (const double step : {1.0, 2.0, 5.0}) {
      const double exponent = decade + std::log10(step);
      if (step != 1.0 && wide) continue;
      if (wide && std::fmod(decade, every) != 0) continue;
      if (exponent >= low && exponent <= high) out.push_back(exponent);
    }
  }
  return out;
}

}  // namespace

std::string tick_text(double value) {
  const double size = std::fabs(value);
  const auto [divisor, unit] = size >= 1e9   ? std::pair(1e9, "G")
                               : size >= 1e6 ? std::pair(1e6, "M")
                               : size >= 1e4 ? std::pair(1e3, "k")
                                             : std::pair(1.0, "");
  char text[40];
  std::snprintf(text, sizeof text, "%.6g%s", value / divisor, unit);
  return text;
}

double tick_middle(double x, const std::string& text, double width) {
  constexpr double kHalfDigit = 3.8;  // of 12 units
  return std::min(x, width - 2 - kHalfDigit * static_cast<double>(text.size()));
}

Axis::Axis(const Quantity& quantity, const std::vector<double>& values)
    : scale_(quantity.scale), limit_(quantity.limit) {
  std::vector<double> places;
  for (const double value : values) {
    if (shows(value)) places.push_back(to_scale(value));
  }
  if (places.empty())
    places = scale_ == Scale::linear ? std::vector{0.0, 1.0} : std::vector{-1.0, 0.0};
  const auto [least, most] = std::minmax_element(places.begin(), places.end());
  low_ = *least;
  high_ = *most;
  const double smallest =
      scale_ != Scale::linear ? 0.02 : std::max(0.002, 0.002 * std::fabs(high_));
  const double margin = std::max(0.05 * (high_ - low_), smallest);
  low_ -= margin;
  high_ += margin;
}

double Axis::to_scale(double value) const {
  switch (scale_) {
    case Scale::log: return std::log10(std::max(value, limit_));
    case Scale::nines: return -std::log10(std::max(1 - value, limit_));
    default: return value;
  }
}

bool Axis::shows(double value) const {
  if (!std::isfinite(value)) return false;
  switch (scale_) {
    case Scale::log: return std::max(value, limit_) > 0;
    case Scale::nines: return std::max(1 - value, limit_) > 0;
    default: return true;
  }
}

double Axis::place(double value) const { return (to_scale(value) - low_) / (high_ - low_); }

std::vector<Axis::Tick> Axis::ticks() const {
  std::vector<Tick> out;
  const auto add = [&](double value) { out.push_back({place(value), tick_text(value)}); };
  if (scale_ == Scale::linear) {
    for (const double value : round_values(low_, high_)) add(value);
    return out;
  }
  const bool nines = scale_ == Scale::nines;
  std::vector<double> exponents =
      nines ? round_exponents(-high_, -low_) : round_exponents(low_, high_);
  if (nines) std::reverse(exponents.begin(), exponents.end());
  if (exponents.size() >= 2) {
    for (const double exponent : exponents) {
      const double power = std::pow(10.0, exponent);
      add(nines ? 1 - power : power);
    }
    return out;
  }
  // Values so close together that no two of those lie among them.
  const double from = nines ? 1 - std::pow(10.0, -low_) : std::pow(10.0, low_);
  const double to = nines ? 1 - std::pow(10.0, -high_) : std::pow(10.0, high_);
  for (const double value : round_values(from, to)) add(value);
  return out;
}

nlohmann::ordered_json Axis::to_json() const {
  nlohmann::ordered_json marks = nlohmann::ordered_json::array();
  for (const Tick& tick : ticks()) marks.push_back({tick.place, tick.text});
  const char* const name = scale_ == Scale::log     ? "log"
                           : scale_ == Scale::nines ? "nines"
                                                    : "linear";
  return {{"scale", name}, {"limit", limit_}, {"low", low_}, {"high", high_}, {"ticks", marks}};
}

}  // namespace keyhole::tools

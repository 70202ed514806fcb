#include "tools/commands/calibrate/choose.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "tools/commands/common/parse_number.h"
#include "tools/commands/common/quantile.h"
#include "tools/terminal/errors.h"
#include "tools/terminal/units.h"

namespace keyhole::tools {

double quantile_of(std::vector<double> samples, double share) {
  std::sort(samples.begin(), samples.end());
  return nearest_rank(samples, share);
}

double Requirement::ratio(std::vector<double> errors) const {
  return quantile_of(std::move(errors), quantile) / limit();
}

double Requirement::cautious_ratio(std::vector<double> errors, size_t steps) const {
  const double spread = std::sqrt(quantile * (1 - quantile) / static_cast<double>(steps));
  return quantile_of(std::move(errors), std::min(1.0, quantile + spread)) / limit();
}

std::string Requirement::text() const {
  return format_number(100 * quantile) + " % of steps below " + format_number(limit());
}

Requirement parse_requirement(const std::string& text, double error) {
  Requirement out;
  out.error = error;
  out.factor = 1;
  const size_t x = text.find('x');
  const std::string name = text.substr(0, x);
  bool good = true;
  if (name == "median") {
    out.quantile = 0.5;
  } else {
    double percent = 0;
    good = name.starts_with("p") && parse_number(std::string_view(name).substr(1), percent) &&
           percent > 0 && percent <= 100;
    out.quantile = percent / 100;
  }
  if (x != std::string::npos) {
    good = good && parse_number(std::string_view(text).substr(x + 1), out.factor) &&
           out.factor > 0 && std::isfinite(out.factor);
  }
  if (!good) {
    throw UsageError("--require " + text +
                     ": allowed: median, pN with N above 0 and up to 100, each with xF for F times "
                     "the error: p95x1.5");
  }
  return out;
}

std::optional<float> search_target(double stated, const std::function<bool(float)>& meets) {
  constexpr double kMostTarget = 0.9;
  constexpr int kDoublings = 3;
  constexpr double kClose = 1.15;
  double met = 0;
  double missed = 0;
  const auto holds = [&](double target) {
    const bool good = meets(static_cast<float>(target));
    (good ? met : missed) = target;
    return good;
  };
  double target = std::min(stated, kMostTarget);
  if (holds(target)) {
    for (int i = 0; i < kDoublings && target * 2 < kMostTarget; ++i) {
      target *= 2;
      if (!holds(target)) break;
    }
  } else {
    for (int i = 0; i < kDoublings; ++i) {
      target /= 2;
      if (holds(target)) break;
    }
    if (met == 0) return std::nullopt;
  }
  while (missed > met * kClose) (void)holds(std::sqrt(met * missed));
  // Three digits say all that there is to know of it, downwards.
  const double unit = std::pow(10, std::floor(std::log10(met)) - 2);
  const double rounded = std::floor(met / unit + 1e-9) * unit;
  return static_cast<float>(rounded);
}

size_t choose_cheapest(const std::vector<Verdict>& verdicts) {
  size_t best = 0;
  for (size_t i = 1; i < verdicts.size(); ++i) {
    const Verdict& a = verdicts[i];
    const Verdict& b = verdicts[best];
    const bool a_meets = a.ratio <= 1;
    const bool b_meets = b.ratio <= 1;
    if (a_meets != b_meets) {
      if (a_meets) best = i;
    } else if (a_meets ? a.cost < b.cost || (a.cost == b.cost && a.ratio < b.ratio)
                       : a.ratio < b.ratio || (a.ratio == b.ratio && a.cost < b.cost)) {
      best = i;
    }
  }
  return best;
}

}  // namespace keyhole::tools

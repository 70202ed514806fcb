// The decisions of calibrate, apart from its measurements: when an error is met, which target meets it, which
// candidate is the cheapest that does.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace keyhole::tools {

/// The requirement: "A share `quantile` of all steps has an output error of at most `factor` times the stated one."
struct Requirement {
  double error = 0.05;
  double quantile = 0.95;
  double factor = 1.5;

  [[nodiscard]] double limit() const { return error * factor; }
  /// The quantile of the errors divided by the limit: the requirement is met where it is at most 1.
  [[nodiscard]] double ratio(std::vector<double> errors) const;
  /// The ratio() for a choice by the errors of only `steps` steps: taken a standard error above the quantile, so that
  /// a candidate that just meets it here is unlikely to miss it elsewhere.
  [[nodiscard]] double cautious_ratio(std::vector<double> errors, size_t steps) const;
  /// The requirement as text: "95 % of steps below 0.075".
  [[nodiscard]] std::string text() const;
};

/// Reads "median", "p95" or "pNN", each with xF for another factor: "p95x1.5". Throws UsageError.
[[nodiscard]] Requirement parse_requirement(const std::string& text, double error);

/// The value that a share of the samples does not exceed (nearest rank); NaN if there are none.
[[nodiscard]] double quantile_of(std::vector<double> samples, double share);

/// Finds the largest target that meets the requirement, within 15 %, starting at the stated error: a target is kept
/// by an estimate, which may be timid or bold for a head. `meets` should be monotone: if it holds for one target, it
/// holds for smaller ones. Nothing where an eighth of the stated error does not meet it either.
inline constexpr double kStrictestShare = 1.0 / 8;
[[nodiscard]] std::optional<float> search_target(double stated,
                                                 const std::function<bool(float)>& meets);

/// A candidate after its measurement.
struct Verdict {
  double ratio = 0;  ///< of the requirement, worst of the traces
  double cost = 0;
};

/// The cheapest candidate that meets the requirement (of equally cheap ones the better), else the one that comes
/// nearest. There must be at least one.
[[nodiscard]] size_t choose_cheapest(const std::vector<Verdict>& verdicts);

}  // namespace keyhole::tools

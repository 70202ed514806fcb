// Asymmetric rounding of a group in double precision, by its definition alone, for the tests of formats that use it.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

namespace keyhole::tools {

/// A number as fp16, by counting in steps of fp16's spacing.
[[nodiscard]] inline double nearest_fp16(double x) {
  if (x == 0) return 0;
  const int exponent = std::max(std::ilogb(x), -14);
  const double step = std::ldexp(1.0, exponent - 10);
  return std::nearbyint(x / step) * step;  // to even, the default rounding
}

struct AffineReference {
  std::vector<double> numbers;  ///< what the group gives back
  std::vector<bool>
      between;      ///< whether so near to where codes change that fp32 may choose the other one
  double step = 0;  ///< between two levels
};

/// The group through codes of `bits` bits whose zero point and step are kept as fp16, times `scale`.
[[nodiscard]] inline AffineReference affine_reference(const std::vector<double>& group, int bits,
                                                      double scale = 1) {
  const auto [least, most] = std::minmax_element(group.begin(), group.end());
  const double levels = std::exp2(bits) - 1;
  const double step = (*most - *least) / levels;
  AffineReference out;
  out.step = std::abs(nearest_fp16(scale * step));
  for (const double x : group) {
    const double at = step > 0 ? (x - *least) / step : 0;
    const double code = std::floor(at + 0.5);
    out.numbers.push_back(code * nearest_fp16(scale * step) + nearest_fp16(scale * *least));
    out.between.push_back(std::abs(at - std::floor(at) - 0.5) < 1e-4);
  }
  return out;
}

}  // namespace keyhole::tools

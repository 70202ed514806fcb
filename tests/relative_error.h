// How far outputs are from the truth, for limits that NaN does not pass: std::max(worst, NaN) is `worst`.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

namespace keyhole::test {

/// |x - truth| / |truth| in the 2-norm of n numbers; infinite where it is NaN: x has one, or both are 0 everywhere. A
/// limit that grows with the error, or one from below, is passed by an infinite one: whether it is finite comes first.
template <class X, class Truth>
[[nodiscard]] double relative_error(const X* x, const Truth* truth, size_t n) {
  double difference = 0.0, norm = 0.0;
  for (size_t i = 0; i < n; ++i) {
    const double right = truth[i];
    difference += (double{x[i]} - right) * (double{x[i]} - right);
    norm += right * right;
  }
  const double error = std::sqrt(difference / norm);
  return std::isnan(error) ? INFINITY : error;
}

/// Of as many numbers as the truth has.
template <class X, class Truth>
[[nodiscard]] double relative_error(const X* x, const std::vector<Truth>& truth) {
  return relative_error(x, truth.data(), truth.size());
}

/// `worst` becomes the larger one of both, and infinite by an error that is NaN.
inline void raise(double& worst, double error) {
  worst = std::isnan(error) ? INFINITY : std::max(worst, error);
}

}  // namespace keyhole::test

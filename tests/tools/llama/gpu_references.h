// The results of the GPU decoder's kernels, in double precision.
#pragma once

#include <cmath>
#include <cstddef>
#include <numbers>
#include <vector>

namespace keyhole::tools::testing {

/// The tolerance for sums of up to 1024 products in fp32 of numbers with 16 bits.
constexpr double kTolerance = 2e-5;

inline double silu(double x) { return x / (1.0 + std::exp(-x)); }
inline double gelu_tanh(double x) {
  return 0.5 * x *
         (1.0 + std::tanh(std::sqrt(2.0 / std::numbers::pi) * (x + 0.044715 * x * x * x)));
}

inline std::vector<double> normed(const std::vector<float>& x, const std::vector<float>& weight,
                                  double eps) {
  std::vector<double> out(x.size());
  const size_t width = weight.size();
  for (size_t row = 0; row < x.size(); row += width) {
    double squares = 0.0;
    for (size_t i = 0; i < width; ++i) squares += static_cast<double>(x[row + i]) * x[row + i];
    for (size_t i = 0; i < width; ++i) {
      out[row + i] = x[row + i] / std::sqrt(squares / static_cast<double>(width) + eps) * weight[i];
    }
  }
  return out;
}

/// Computes y `[m, n]` = x `[m, k]` w^T.
inline std::vector<double> product(const std::vector<double>& x, const std::vector<double>& w,
                                   size_t m, size_t n, size_t k) {
  std::vector<double> y(m * n, 0.0);
  for (size_t i = 0; i < m; ++i) {
    for (size_t j = 0; j < n; ++j) {
      for (size_t c = 0; c < k; ++c) y[i * n + j] += x[i * k + c] * w[j * k + c];
    }
  }
  return y;
}

}  // namespace keyhole::tools::testing

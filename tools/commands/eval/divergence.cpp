#include "tools/commands/eval/divergence.h"

#include <algorithm>
#include <cmath>

#include "tools/commands/eval/scores.h"

namespace keyhole::tools {

double divergence(std::span<const float> exact, std::span<const float> other) {
  return divergence(exact, log_sum_exp(exact), other, log_sum_exp(other));
}

double divergence(std::span<const float> exact, double exact_log_sum, std::span<const float> other,
                  double other_log_sum) {
  double sum = 0.0;
  for (size_t i = 0; i < exact.size(); ++i) {
    const double log_p = exact[i] - exact_log_sum;
    sum += std::exp(log_p) * (log_p - (other[i] - other_log_sum));
  }
  // Rounding may leave some 1e-17 below what cannot be negative.
  return std::max(sum, 0.0);
}

double divergence_from_log_probabilities(std::span<const float> base, float least,
                                         std::span<const float> other, double other_log_sum) {
  double sum = 0.0;
  for (size_t i = 0; i < base.size(); ++i) {
    if (base[i] <= least) continue;
    const double log_p = base[i];
    sum += std::exp(log_p) * (log_p - (other[i] - other_log_sum));
  }
  return sum;
}

Spread spread_of(std::vector<double> values) {
  const auto n = static_cast<double>(values.size());
  Spread s;
  s.mean = mean_of(values);
  double squares = 0.0;
  for (const double x : values) squares += (x - s.mean) * (x - s.mean);
  s.error = values.size() > 1 ? std::sqrt(squares / (n * (n - 1))) : 0.0;
  std::sort(values.begin(), values.end());
  const auto quantile = [&](double share) {
    const auto rank = static_cast<size_t>(std::ceil(share * n - 1e-9));
    return values[std::clamp<size_t>(rank, 1, values.size()) - 1];
  };
  s.p50 = quantile(0.5);
  s.p90 = quantile(0.9);
  s.p99 = quantile(0.99);
  s.p999 = quantile(0.999);
  s.largest = values.back();
  return s;
}

std::vector<double> means_in_order(std::span<const double> values, size_t pieces) {
  const size_t count = std::min(pieces, values.size());
  std::vector<double> means;
  for (size_t i = 0; i < count; ++i) {
    const size_t begin = values.size() * i / count, end = values.size() * (i + 1) / count;
    means.push_back(mean_of(values.subspan(begin, end - begin)));
  }
  return means;
}

}  // namespace keyhole::tools

#include "tools/commands/eval/scores.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace keyhole::tools {

double log_sum_exp(std::span<const float> logits) {
  double largest = -INFINITY;
  for (const float x : logits) largest = std::max(largest, double{x});
  double sum = 0.0;
  for (const float x : logits) sum += std::exp(x - largest);
  return largest + std::log(sum);
}

double bits_of(std::span<const float> logits, uint32_t token) {
  return bits_of(logits, token, log_sum_exp(logits));
}

double bits_of(std::span<const float> logits, uint32_t token, double log_sum) {
  return (log_sum - logits[token]) / std::log(2.0);
}

double mean_of(std::span<const double> values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

Difference paired_difference(std::span<const double> values, std::span<const double> exact) {
  const auto n = static_cast<double>(values.size());
  const double mean = mean_of(values) - mean_of(exact);
  double squares = 0.0;
  for (size_t i = 0; i < values.size(); ++i) {
    const double d = values[i] - exact[i] - mean;
    squares += d * d;
  }
  return {mean, n > 1 ? std::sqrt(squares / (n * (n - 1))) : 0.0};
}

Swaps count_swaps(const std::vector<bool>& right, const std::vector<bool>& exact) {
  Swaps swaps;
  for (size_t i = 0; i < right.size(); ++i) {
    swaps.lost += static_cast<size_t>(exact[i] && !right[i]);
    swaps.won += static_cast<size_t>(!exact[i] && right[i]);
  }
  return swaps;
}

}  // namespace keyhole::tools

// How far the predictions of one way to attend are from another's: the Kullback-Leibler divergence of their softmax
// distributions, and its tail.
#pragma once

#include <span>
#include <vector>

namespace keyhole::tools {

/// sum of p ln(p / q) in nats, where p and q are the softmax distributions of the logits of `exact` and of `other`,
/// which are as many.
[[nodiscard]] double divergence(std::span<const float> exact, std::span<const float> other);
/// The same, where log_sum_exp() of both is known.
[[nodiscard]] double divergence(std::span<const float> exact, double exact_log_sum,
                                std::span<const float> other, double other_log_sum);

/// The same sum, where p is given by log-probabilities in nats, over the tokens whose log-probability in `base` is
/// above `least`, as llama.cpp has it. What is left out, and rounding in `base`, may leave some 1e-4 below 0.
[[nodiscard]] double divergence_from_log_probabilities(std::span<const float> base, float least,
                                                       std::span<const float> other,
                                                       double other_log_sum);

/// A sample by its mean, the mean's standard error, and its quantiles: the smallest value that so large a share of the
/// sample does not exceed. The last per mille of fewer than 1,000 values is their largest.
struct Spread {
  double mean = 0.0, error = 0.0;
  double p50 = 0.0, p90 = 0.0, p99 = 0.0, p999 = 0.0, largest = 0.0;
};
/// Of 1 value or more.
[[nodiscard]] Spread spread_of(std::vector<double> values);

/// Means of nearly equal pieces of a sample in its order, `pieces` or as many as there are values.
[[nodiscard]] std::vector<double> means_in_order(std::span<const double> values, size_t pieces);

}  // namespace keyhole::tools

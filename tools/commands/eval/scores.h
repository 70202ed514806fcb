// How answers are scored, and how those of one way to attend differ from those of another.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace keyhole::tools {

/// ln of the sum of e^logit.
[[nodiscard]] double log_sum_exp(std::span<const float> logits);

/// The bits of `token` by logits: minus the binary logarithm of its softmax probability.
[[nodiscard]] double bits_of(std::span<const float> logits, uint32_t token);
/// The same, where log_sum_exp() is known.
[[nodiscard]] double bits_of(std::span<const float> logits, uint32_t token, double log_sum);

[[nodiscard]] double mean_of(std::span<const double> values);

/// The mean of the differences `values[i] - exact[i]` and its standard error. Values are compared pair by pair,
/// because pairs differ in difficulty a hundred times more than a way to attend adds.
struct Difference {
  double mean = 0.0, error = 0.0;
};
/// The difference of two samples of the same size, 1 or more.
[[nodiscard]] Difference paired_difference(std::span<const double> values,
                                           std::span<const double> exact);

/// Numbers of answers that only exact attention got right, and that only this way got right: equal totals may hide
/// both.
struct Swaps {
  size_t lost = 0, won = 0;
};
/// Counts the swaps between two lists of the same size.
[[nodiscard]] Swaps count_swaps(const std::vector<bool>& right, const std::vector<bool>& exact);

}  // namespace keyhole::tools

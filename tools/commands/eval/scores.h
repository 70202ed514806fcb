// How answers are scored, and how those of one way to attend differ from those of another.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace keyhole::tools {

/// Bits of `token` by logits: minus the binary logarithm of its softmax probability.
[[nodiscard]] double bits_of(std::span<const float> logits, uint32_t token);

[[nodiscard]] double mean_of(std::span<const double> values);

/// Mean of the differences `values[i] - exact[i]` and its standard error: pair by pair, as what makes one pair harder
/// than another is a hundred times larger than what a way to attend adds.
struct Difference {
  double mean = 0.0, error = 0.0;
};
/// Both of the same size, from 1 on.
[[nodiscard]] Difference paired_difference(std::span<const double> values,
                                           std::span<const double> exact);

/// Right with exact attention and wrong here, and the other way round: equal totals may hide both.
struct Swaps {
  size_t lost = 0, won = 0;
};
/// Both of the same size.
[[nodiscard]] Swaps count_swaps(const std::vector<bool>& right, const std::vector<bool>& exact);

}  // namespace keyhole::tools

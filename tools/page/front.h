// Pareto fronts.
#pragma once

#include <span>
#include <vector>

namespace keyhole::tools {

/// Which points no other one beats: none has less of one figure and at most as much of the other. Of both figures less
/// is better; NaN is on no front. Both of the same size.
[[nodiscard]] std::vector<bool> pareto_front(std::span<const double> costs,
                                             std::span<const double> losses);

}  // namespace keyhole::tools

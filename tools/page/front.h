// Pareto fronts.
#pragma once

#include <span>
#include <vector>

namespace keyhole::tools {

/// The points that no other one beats, that is, none has less of one figure and at most as much of the other. Less is
/// better in both figures; NaN is on no front. Both spans have the same size.
[[nodiscard]] std::vector<bool> pareto_front(std::span<const double> costs,
                                             std::span<const double> losses);

}  // namespace keyhole::tools

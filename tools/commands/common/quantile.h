// Quantiles of measured samples.
#pragma once

#include <vector>

namespace keyhole::tools {

/// The smallest of the sorted values that at least `share` of them do not exceed (nearest rank), so that it is a
/// measured one. NaN where there are none.
[[nodiscard]] double nearest_rank(const std::vector<double>& sorted, double share);

}  // namespace keyhole::tools

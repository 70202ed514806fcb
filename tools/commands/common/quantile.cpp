#include "tools/commands/common/quantile.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace keyhole::tools {

double nearest_rank(const std::vector<double>& sorted, double share) {
  if (sorted.empty()) return std::numeric_limits<double>::quiet_NaN();
  const auto rank = static_cast<size_t>(std::ceil(share * static_cast<double>(sorted.size())));
  return sorted[std::max<size_t>(rank, 1) - 1];
}

}  // namespace keyhole::tools

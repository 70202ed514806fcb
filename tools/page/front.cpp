#include "tools/page/front.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace keyhole::tools {

std::vector<bool> pareto_front(std::span<const double> costs, std::span<const double> losses) {
  std::vector<size_t> order(costs.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::erase_if(order, [&](size_t i) { return std::isnan(costs[i]) || std::isnan(losses[i]); });
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return costs[a] != costs[b] ? costs[a] < costs[b] : losses[a] < losses[b];
  });
  std::vector<bool> out(costs.size(), false);
  // Goes by growing cost: a point is on the front if it loses less than all before it, or equals such a point.
  double least = std::numeric_limits<double>::infinity();
  double cost_of_least = -std::numeric_limits<double>::infinity();
  for (const size_t i : order) {
    const bool equal = losses[i] == least && costs[i] == cost_of_least;
    if (losses[i] < least || equal) {
      out[i] = true;
      least = losses[i];
      cost_of_least = costs[i];
    }
  }
  return out;
}

}  // namespace keyhole::tools

#include "tools/commands/common/head_answers.h"

#include <algorithm>
#include <limits>

namespace keyhole::tools {

HeadAnswers::HeadAnswers(const HeadTruth& truth, size_t neighbours_of_a_row)
    : count(neighbours_of_a_row),
      neighbours(truth.rows() * count, -1),
      products(truth.rows() * count, -std::numeric_limits<float>::infinity()) {}

void HeadAnswers::put(const HeadTruth& truth, size_t row, std::span<const uint32_t> ids) {
  std::vector<std::pair<double, uint32_t>> scored;
  for (const uint32_t id : ids) {
    const float* key = truth.offloaded_key(id);
    const float* q = truth.query(row);
    double product = 0;
    for (size_t i = 0; i < truth.dim; ++i) product += double{q[i]} * key[i];
    scored.emplace_back(-product, id);  // the best first, of equal ones the first key
  }
  const size_t kept = std::min(count, scored.size());
  std::partial_sort(scored.begin(), scored.begin() + static_cast<ptrdiff_t>(kept), scored.end());
  for (size_t i = 0; i < kept; ++i) {
    neighbours[row * count + i] = scored[i].second;
    products[row * count + i] = static_cast<float>(-scored[i].first);
  }
  found += static_cast<double>(scored.size()) / static_cast<double>(truth.rows());
}

}  // namespace keyhole::tools

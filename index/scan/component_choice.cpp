#include "index/scan/component_choice.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace keyhole::index {

namespace {

double size_of(const float* query, std::span<const float> scale, uint32_t j) {
  return scale.empty() ? std::abs(query[j]) : std::abs(double{query[j]}) / scale[j];
}

}  // namespace

void choose_components(const float* queries, uint32_t group, uint32_t dim,
                       std::span<const float> scale, uint32_t r, uint32_t* components) {
  std::pair<double, uint32_t> sums[kMaxHeadDim];  // doubles: sums of the largest floats stay finite
  for (uint32_t j = 0; j < dim; ++j) {
    sums[j] = {0.0, j};
    for (uint32_t h = 0; h < group; ++h)
      sums[j].first += size_of(queries + size_t{h} * dim, scale, j);
  }
  const auto larger = [](const auto& a, const auto& b) {
    return a.first != b.first ? a.first > b.first : a.second < b.second;
  };
  if (r < dim) std::nth_element(sums, sums + r, sums + dim, larger);
  for (uint32_t c = 0; c < r; ++c) components[c] = sums[c].second;
  std::sort(components, components + r);
}

float softmax_sharpening(const float* query, uint32_t dim, std::span<const float> scale,
                         std::span<const uint32_t> components) {
  double all = 0.0;
  double chosen = 0.0;
  for (uint32_t j = 0; j < dim; ++j) all += size_of(query, scale, j);
  for (const uint32_t j : components) chosen += size_of(query, scale, j);
  return chosen > 0.0 ? static_cast<float>(std::sqrt(all / chosen)) : 1.0F;
}

}  // namespace keyhole::index

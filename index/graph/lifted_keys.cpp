#include "index/graph/lifted_keys.h"

#include <algorithm>
#include <cmath>

namespace keyhole::index {
namespace {

double squared_norm(const cpu::Kernels& kernels, const RowsView& keys, size_t row) {
  float x[kMaxHeadDim];
  kernels.to_f32[static_cast<size_t>(keys.dtype)](keys.row(row), x, keys.dim);
  double sum = 0.0;
  for (uint32_t j = 0; j < keys.dim; ++j) sum += double{x[j]} * x[j];
  return sum;
}

}  // namespace

LiftedKeys::LiftedKeys(const cpu::Kernels& kernels, const RowsView& keys, double radius)
    : kernels_(&kernels), keys_(keys), extra_(keys.count, 0.0F) {
  if (radius == 0.0) return;
  for (size_t i = 0; i < keys.count; ++i) {
    const double rest = radius * radius - squared_norm(kernels, keys, i);
    extra_[i] = static_cast<float>(std::sqrt(std::max(rest, 0.0)));
  }
}

double LiftedKeys::largest_norm(const cpu::Kernels& kernels, const RowsView& keys) {
  double largest = 0.0;
  for (size_t i = 0; i < keys.count; ++i) {
    largest = std::max(largest, squared_norm(kernels, keys, i));
  }
  return std::sqrt(largest);
}

double LiftedKeys::norm_quantile(const cpu::Kernels& kernels, const RowsView& keys,
                                 double quantile) {
  if (keys.count == 0) return 0.0;
  std::vector<double> norms(keys.count);
  for (size_t i = 0; i < keys.count; ++i) norms[i] = squared_norm(kernels, keys, i);
  const auto at =
      norms.begin() + static_cast<std::ptrdiff_t>(quantile * static_cast<double>(keys.count - 1));
  std::nth_element(norms.begin(), at, norms.end());
  return std::sqrt(*at);
}

float LiftedKeys::load(uint32_t row, float* query) const {
  kernels_->to_f32[static_cast<size_t>(keys_.dtype)](keys_.row(row), query, keys_.dim);
  return extra_[row];
}

void LiftedKeys::similarity(const float* query, float extra, const uint32_t* ids, size_t n,
                            float* out) const {
  kernels_->score[static_cast<size_t>(keys_.dtype)]({.queries = query,
                                                     .group = 1,
                                                     .dim = keys_.dim,
                                                     .keys = keys_.data,
                                                     .key_stride = keys_.stride,
                                                     .ids = ids,
                                                     .count = n,
                                                     .scores = out,
                                                     .score_stride = n});
  for (size_t i = 0; i < n; ++i) out[i] += extra * extra_[ids[i]];
}

}  // namespace keyhole::index

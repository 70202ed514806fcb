#include "index/lifted_keys.h"

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

void LiftedKeys::aim(uint32_t row) {
  if (row == target_) return;
  target_ = row;
  kernels_->to_f32[static_cast<size_t>(keys_.dtype)](keys_.row(row), query_, keys_.dim);
}

void LiftedKeys::similarity(const uint32_t* ids, size_t n, float* out) const {
  kernels_->score[static_cast<size_t>(keys_.dtype)]({.queries = query_,
                                                     .group = 1,
                                                     .dim = keys_.dim,
                                                     .keys = keys_.data,
                                                     .key_stride = keys_.stride,
                                                     .ids = ids,
                                                     .count = n,
                                                     .scores = out,
                                                     .score_stride = n});
  for (size_t i = 0; i < n; ++i) out[i] += extra_[target_] * extra_[ids[i]];
}

}  // namespace keyhole::index

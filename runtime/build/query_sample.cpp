#include "runtime/build/query_sample.h"

#include <algorithm>

#include "index/grow.h"

namespace keyhole::runtime {
int QuerySample::wanted_head(uint32_t position) const {
  if (capacity_ == 0 || position % stride_ != 0) return -1;
  // A hash and not position % group: strides are powers of two, so that with a group of 4 every
  // kept position would name the same head.
  return static_cast<int>(((position * 0x9E3779B1U) >> 16) % group_);
}

void QuerySample::add(uint32_t position, const float* query) {
  if (positions_.size() == capacity_) thin();
  if (position % stride_ != 0) return;
  index::make_room(rows_, dim_);
  positions_.push_back(position);
  rows_.insert(rows_.end(), query, query + dim_);
}

void QuerySample::thin() {
  // At least half must go; with uneven positions one doubling may not be enough.
  while (positions_.size() > capacity_ / 2) {
    stride_ *= 2;
    size_t kept = 0;
    for (size_t i = 0; i < positions_.size(); ++i) {
      if (positions_[i] % stride_ != 0) continue;
      positions_[kept] = positions_[i];
      std::copy_n(rows_.begin() + static_cast<ptrdiff_t>(i * dim_), dim_,
                  rows_.begin() + static_cast<ptrdiff_t>(kept * dim_));
      ++kept;
    }
    positions_.resize(kept);
    rows_.resize(kept * dim_);
    if (stride_ >= (1U << 30)) break;
  }
}

void QuerySample::truncate(uint32_t position) {
  const auto keep =
      std::lower_bound(positions_.begin(), positions_.end(), position) - positions_.begin();
  positions_.resize(static_cast<size_t>(keep));
  rows_.resize(static_cast<size_t>(keep) * dim_);
}

index::TrainingQueries QuerySample::view() const {
  RowsView rows{reinterpret_cast<const std::byte*>(rows_.data()), dim_ * sizeof(float),
                positions_.size(), dim_, DType::f32};
  return {rows, positions_.data()};
}

void QuerySample::restore(uint32_t stride, std::vector<uint32_t> positions,
                          std::vector<float> rows) {
  stride_ = stride;
  positions_ = std::move(positions);
  rows_ = std::move(rows);
}

}  // namespace keyhole::runtime

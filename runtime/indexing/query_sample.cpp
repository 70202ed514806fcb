#include "runtime/indexing/query_sample.h"

#include <algorithm>

#include "index/grow.h"

namespace keyhole::runtime {
int QuerySample::wanted_head(uint32_t position) const {
  if (capacity_ == 0 || position % stride_ != 0) return -1;
  // A hash and not position % group: strides are powers of two, so that with a group of 4 every
  // kept position would name the same head.
  return static_cast<int>(((position * 0x9E3779B1U) >> 16) % group_);
}

QuerySample::Kept& QuerySample::own() {
  if (!kept_) kept_ = cpu::Shared(Kept());
  Kept& kept = kept_.own();
  kept.positions.resize(size_);
  kept.rows.resize(size_ * dim_);
  return kept;
}

void QuerySample::add(uint32_t position, const float* query) {
  if (size_ == capacity_) thin();
  if (position % stride_ != 0) return;
  Kept& kept = own();
  index::make_room(kept.rows, dim_);
  kept.positions.push_back(position);
  kept.rows.insert(kept.rows.end(), query, query + dim_);
  ++size_;
}

void QuerySample::thin() {
  Kept& all = own();
  // At least half must go; with uneven positions one doubling may not be enough.
  while (size_ > capacity_ / 2) {
    stride_ *= 2;
    size_t kept = 0;
    for (size_t i = 0; i < size_; ++i) {
      if (all.positions[i] % stride_ != 0) continue;
      all.positions[kept] = all.positions[i];
      std::copy_n(all.rows.begin() + static_cast<ptrdiff_t>(i * dim_), dim_,
                  all.rows.begin() + static_cast<ptrdiff_t>(kept * dim_));
      ++kept;
    }
    size_ = kept;
    if (stride_ >= (1U << 30)) break;
  }
}

void QuerySample::truncate(uint32_t position) noexcept {
  const auto all = positions();
  const auto kept =
      static_cast<size_t>(std::lower_bound(all.begin(), all.end(), position) - all.begin());
  if (kept == size_) return;  // a build in the background may be reading
  size_ = kept;
  if (size_ == 0) kept_ = {};
}

index::TrainingQueries QuerySample::view() const {
  return {dense_rows(rows().data(), size_, dim_, DType::f32), positions().data()};
}

void QuerySample::restore(uint32_t stride, std::vector<uint32_t> positions,
                          std::vector<float> rows) {
  const size_t size = positions.size();
  kept_ = cpu::Shared(Kept{std::move(positions), std::move(rows)});
  stride_ = stride;
  size_ = size;
}

}  // namespace keyhole::runtime

// The state of the rows that were not read: their weight, and the mean values that stand for them.
#include "index/tail/tail_estimate.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace keyhole::index {
namespace {

// A partition below this share of a head's mass gives its mass to the mean value of all: reading its own mean
// value (256 bytes in fp16) changes the output by less than this share. 2e-4 reads half as many bytes more and
// leaves the same error, 2e-3 leaves 3 % more.
constexpr float kLeastShare = 1e-3F;

}  // namespace

bool TailEstimate::keeps(size_t position) const {
  for (uint32_t h = 0; h < query_.group; ++h) {
    if (weights_[h * capacity_ + position] > least_[h]) return true;
  }
  return false;
}

void TailEstimate::state(const RowsView& values, StateView out) {
  const uint32_t dim = tree_->dim();
  const uint32_t group = query_.group;
  const auto type = static_cast<size_t>(tree_->dtype());
  // What next_rows() opened was taken off sum by sum; without it the sums are those of begin().
  if (is_marked_) add_up();
  std::fill_n(out.o, size_t{group} * dim, 0.0F);
  double rest[kMaxGroup];
  const bool own_means = query_.mode != TailMode::mean;
  for (uint32_t h = 0; h < group; ++h) {
    rest[h] = unread_[h];
    least_[h] = own_means ? static_cast<float>(kLeastShare * (seen_[h] + unread_[h]))
                          : std::numeric_limits<float>::infinity();
  }
  const auto sum = [&](const TailLevel& level, size_t begin, size_t end) {
    size_t kept = 0;
    for (size_t p = begin; p < end; ++p) {
      if (sizes_[p] == 0.0F || !keeps(p)) continue;
      const size_t id = p < coarse_ ? p : fine_at(p);
      const float whole = level.sizes[id] / sizes_[p];
      for (uint32_t h = 0; h < group; ++h) {
        const float weight = weights_[h * capacity_ + p];
        kept_weights_[h * capacity_ + kept] = weight * whole;
        rest[h] -= weight;
      }
      ids_[kept++] = static_cast<uint32_t>(id);
    }
    if (kept == 0) return;
    const RowsView means = dense_rows(level.values.data(), level.sizes.size(), dim, tree_->dtype());
    kernels_->weighted_sum[type]({.weights = kept_weights_.data(),
                                  .weight_stride = capacity_,
                                  .group = group,
                                  .values = means,
                                  .ids = ids_.data(),
                                  .count = kept,
                                  .o = out.o});
    bytes_read_ += kept * means.row_bytes();
  };
  if (own_means) {
    sum(tree_->coarse(), 0, coarse_);
    sum(tree_->fine(), coarse_, count_);
    // The values that were read leave the means of what is left.
    const size_t stride = row_capacity_;
    size_t leaving = 0;
    for (size_t i = 0; i < read_.rows.size(); ++i) {
      const size_t p = position_of_read(i);
      if (sizes_[p] == 0.0F || !keeps(p)) continue;
      for (uint32_t h = 0; h < group; ++h) {
        read_weights_[h * stride + leaving] = -weights_[h * capacity_ + p] / sizes_[p];
      }
      read_ids_[leaving++] = read_.rows[i];
    }
    if (leaving != 0) {
      kernels_->weighted_sum[static_cast<size_t>(values.dtype)]({.weights = read_weights_.data(),
                                                                 .weight_stride = stride,
                                                                 .group = group,
                                                                 .values = values,
                                                                 .ids = read_ids_.data(),
                                                                 .count = leaving,
                                                                 .o = out.o});
    }
  }
  for (uint32_t h = 0; h < group; ++h) {
    if (!(unread_[h] > 0.0)) {
      std::fill_n(out.o + size_t{h} * dim, dim, 0.0F);
      out.lse[h] = kMinusInf;
      continue;
    }
    const auto share = static_cast<float>(std::max(rest[h], 0.0) / unread_[h]);
    const auto inverse = static_cast<float>(1.0 / unread_[h]);
    for (uint32_t j = 0; j < dim; ++j) {
      float& o = out.o[size_t{h} * dim + j];
      o = o * inverse + share * tree_->mean_value()[j];
    }
    out.lse[h] = static_cast<float>(double{shifts_[h]} + std::log(unread_[h]));
  }
}

}  // namespace keyhole::index

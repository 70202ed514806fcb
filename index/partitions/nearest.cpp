#include "index/partitions/nearest.h"

#include <algorithm>

#include "cpu/row_access.h"
#include "index/scan/sixteen.h"

namespace keyhole::index {
namespace {

constexpr size_t kPointsAtOnce = 16;
constexpr size_t kTile = 512;  // centroids per kernel call: 16 x 512 scores are 32 KiB, within L1

struct Best {
  float score = kMinusInf;
  uint32_t label = 0;
};

// The first largest of scores[i] - offsets[i], if it beats `best`. After the first few, hardly any block of
// sixteen holds a better one.
void improve(const float* scores, const float* offsets, size_t n, size_t first, Best& best) {
  size_t i = 0;
  for (; i + kSixteen <= n; i += kSixteen) {
    if (no_difference_above(scores + i, offsets + i, best.score)) continue;
    for (size_t j = i; j < i + kSixteen; ++j) {
      const float s = scores[j] - offsets[j];
      if (s > best.score) best = {s, static_cast<uint32_t>(first + j)};
    }
  }
  for (; i < n; ++i) {
    const float s = scores[i] - offsets[i];
    if (s > best.score) best = {s, static_cast<uint32_t>(first + i)};
  }
}

}  // namespace

void NearestCentroid::set(const float* centroids, size_t n) {
  centroids_ = centroids;
  count_ = n;
  offsets_.assign(n, 0.0F);
  if (nearness_ == Nearness::inner_product) return;
  for (size_t c = 0; c < n; ++c) {
    double sum = 0.0;
    for (uint32_t j = 0; j < dim_; ++j) {
      const double x = centroids[c * dim_ + j];
      sum += x * x;
    }
    offsets_[c] = static_cast<float>(sum / 2);
  }
}

void NearestCentroid::set(const float* centroids, const std::vector<float>& bonuses) {
  centroids_ = centroids;
  count_ = bonuses.size();
  offsets_.resize(count_);
  for (size_t c = 0; c < count_; ++c) offsets_[c] = -bonuses[c];
}

void NearestCentroid::assign(const float* points, size_t n, uint32_t* labels) const {
  float scores[kPointsAtOnce * kTile];
  for (size_t p = 0; p < n; p += kPointsAtOnce) {
    const auto group = static_cast<uint32_t>(std::min<size_t>(kPointsAtOnce, n - p));
    Best best[kPointsAtOnce];
    for (size_t c = 0; c < count_; c += kTile) {
      const size_t tile = std::min(kTile, count_ - c);
      cpu::score_rows(*kernels_, dense_rows(centroids_ + c * dim_, tile, dim_, DType::f32),
                      points + p * dim_, group, nullptr, tile, scores, kTile);
      for (uint32_t h = 0; h < group; ++h) {
        improve(scores + h * kTile, offsets_.data() + c, tile, c, best[h]);
      }
    }
    for (uint32_t h = 0; h < group; ++h) labels[p + h] = best[h].label;
  }
}

}  // namespace keyhole::index

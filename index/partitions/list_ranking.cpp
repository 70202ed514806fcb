#include "index/partitions/list_ranking.h"

#include <algorithm>
#include <cmath>

#include "index/scan/sixteen.h"
#include "index/scan/topk.h"

namespace keyhole::index {
namespace {

// importance[l] += (1 + z/8)^8, with z the standardised score of list l and 0 below z = -8. It follows
// exp(z) up to the far outliers and consists of operations that the baseline instruction set vectorises.
void add_importance(const float* scores, size_t n, float* importance) {
  float part_sums[kSixteen] = {};
  float part_squares[kSixteen] = {};
  // Shifted by the first score, so that a mean far from 0 (keys share a large mean) costs no precision.
  const float origin = scores[0];
  size_t i = 0;
  for (; i + kSixteen <= n; i += kSixteen) {
    for (size_t j = 0; j < kSixteen; ++j) {
      const float x = scores[i + j] - origin;
      part_sums[j] += x;
      part_squares[j] += x * x;
    }
  }
  double sum = 0.0;
  double squares = 0.0;
  for (; i < n; ++i) {
    const double x = scores[i] - origin;
    sum += x;
    squares += x * x;
  }
  for (size_t j = 0; j < kSixteen; ++j) {
    sum += part_sums[j];
    squares += part_squares[j];
  }
  const double mean = sum / static_cast<double>(n);
  const double deviation = std::sqrt(squares / static_cast<double>(n) - mean * mean);
  // All lists alike, or scores that overflowed: this head has no preference. (The comparison is false
  // for NaN.)
  if (!(deviation > 1e-6 * std::abs(mean)) || !std::isfinite(deviation)) return;
  const auto scale = static_cast<float>(1.0 / (8 * deviation));
  const auto center = static_cast<float>(origin + mean);
  for (size_t l = 0; l < n; ++l) {
    float x = 1.0F + (scores[l] - center) * scale;
    x = x > 0.0F ? x : 0.0F;
    x *= x;
    x *= x;
    importance[l] += x * x;
  }
}

}  // namespace

void ListRanking::reserve(uint32_t max_group, size_t lists) {
  if (room_ >= lists) return;
  const size_t room = lists + lists / 4;  // lists grow as rows are appended
  scores_.resize(max_group * room);
  importance_.resize(room);
  ranks_.resize(room);
  spare_.resize(room);
  chosen_.resize(room);
  room_ = room;  // last: where an allocation fails, the next call tries again
}

void ListRanking::combine(uint32_t group, size_t lists) {
  std::fill_n(importance_.begin(), lists, 0.0F);
  for (uint32_t h = 0; h < group; ++h) {
    add_importance(scores_.data() + h * room_, lists, importance_.data());
  }
}

std::span<const uint32_t> ListRanking::select(size_t lists, size_t probe) {
  for (size_t l = 0; l < lists; ++l)
    ranks_[l] = pack_rank(importance_[l], static_cast<uint32_t>(l));
  select_ranks(ranks_.data(), lists, probe);
  // Best first: the top-k's threshold then rises early and skips most of what follows.
  sort_ranks(ranks_.data(), spare_.data(), probe);
  for (size_t i = 0; i < probe; ++i) chosen_[i] = rank_row(ranks_[i]);
  return {chosen_.data(), probe};
}

}  // namespace keyhole::index

#include "index/scan/list_choice.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "cpu/attention_state.h"
#include "cpu/code_doubt.h"
#include "cpu/row_access.h"
#include "index/grow.h"

namespace keyhole::index {
namespace {

// 512 mean keys are 128 KiB at d = 128, some 12 us; 256 lists of which an eighth is read, some 30 us.
constexpr size_t kListsPerRank = 512;
constexpr size_t kListsPerScan = 256;

// Logits below a head's heaviest list at which lists count as its lightest.
constexpr float kDeepest = 32.0F;

// Up to this variance of a list's logits all of it counts, beyond only as its root grows, without a step in value or
// slope: keys of some models are hundreds long, and the widest list is not the best one then.
constexpr float kWidestSpread = 16.0F;
constexpr float kFar = 8.0F;  // 2 sqrt(kWidestSpread)

// A head may always leave so much of its weight: short outputs do not make it read what is next to nothing.
constexpr float kLittle = 1.0F / 64.0F;

/// Lists by how far they are below the best, in steps of a part of a logit: the rows that they have, or the weight.
template <int kPartsOfOne>
class Histogram {
 public:
  static constexpr size_t kBins = 512;

  static size_t bin_of(float below) {
    const float step = below * kPartsOfOne;
    return step < kBins - 1.0F ? static_cast<size_t>(step)
                               : kBins - 1;  // the last for what is no number
  }
  void add(float below, float x) { bins_[bin_of(below)] += x; }
  /// The last bin for all before and in it to have at most `most`, at least the first that has any.
  [[nodiscard]] size_t last_within(float most) const {
    float sum = 0.0F;
    for (size_t b = 0; b < kBins; ++b) {
      if (sum != 0.0F && sum + bins_[b] > most) return b - 1;
      sum += bins_[b];
    }
    return kBins - 1;
  }
  /// The first bin for all behind it to have at most `most` together.
  [[nodiscard]] size_t first_before(float most) const {
    float sum = 0.0F;
    for (size_t b = kBins - 1; b > 0; --b) {
      sum += bins_[b];
      if (!(sum <= most)) return b;
    }
    return 0;
  }

 private:
  std::array<float, kBins> bins_{};
};
using RowsByGain = Histogram<8>;
// 16 logits: what is further below a head's heaviest list weighs nothing.
using WeightByHope = Histogram<32>;

/// Sums of the weights of all lists, and of those whose size is not 0.
struct WeightSums {
  WeightSums(const float* weights, const float* sizes, size_t n) {
    constexpr size_t kLanes = 8;  // one chain would wait for each sum
    std::array<float, kLanes> alls{}, lefts{};
    size_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
      for (size_t lane = 0; lane < kLanes; ++lane) {
        alls[lane] += weights[i + lane];
        lefts[lane] += sizes[i + lane] != 0.0F ? weights[i + lane] : 0.0F;
      }
    }
    for (; i < n; ++i) {
      alls[0] += weights[i];
      lefts[0] += sizes[i] != 0.0F ? weights[i] : 0.0F;
    }
    for (size_t lane = 0; lane < kLanes; ++lane) all += alls[lane], left += lefts[lane];
  }
  float all = 0.0F, left = 0.0F;
};

uint32_t parts_of(size_t lists, size_t each) {
  return static_cast<uint32_t>(std::clamp<size_t>(lists / each, 1, ListChoice::kMostParts));
}

}  // namespace

uint32_t ListChoice::rank_parts(size_t lists) { return parts_of(lists, kListsPerRank); }
uint32_t ListChoice::scan_parts(size_t lists) { return parts_of(lists, kListsPerScan); }

void ListChoice::reserve(const CodeShape& shape, size_t lists, uint32_t group) {
  grow(rows_, size_t{group} * shape.dim);
  grow(hopes_, group * lists);
  grow(gains_, lists);
  grow(sizes_, lists);
  grow(chosen_, lists);
  grow(scores_, group * lists);
  grow(weights_, group * lists);
  grow(means_, size_t{group} * shape.dim);
}

size_t ListChoice::bytes() const {
  return (rows_.size() + means_.size() + scores_.size() + hopes_.size() + weights_.size() +
          gains_.size() + sizes_.size()) *
             sizeof(float) +
         chosen_.size() * sizeof(uint32_t);
}

void ListChoice::begin(const CodeLists& lists, const cpu::Kernels& kernels, const float* queries,
                       uint32_t group, const LogitParams& logits) {
  reserve(lists.shape(), lists.lists(), group);
  lists_ = &lists;
  kernels_ = &kernels;
  group_ = group;
  logits_ = logits;
  stride_ = lists.lists();
  has_beyond_ = rotate_queries(lists.balance(), queries, group, rows_.data(), norms_);
}

void ListChoice::rank(uint32_t part) {
  const uint32_t parts = rank_parts(stride_);
  const size_t begin = stride_ * part / parts, end = stride_ * (part + 1) / parts;
  const uint32_t dim = lists_->shape().dim;
  std::fill_n(part_tops_[part], group_, kMinusInf);
  std::fill_n(part_lows_[part], group_, std::numeric_limits<float>::infinity());
  std::fill_n(part_logits_[part], group_, kMinusInf);
  for (size_t c = 0; c < lists_->chunks(); ++c) {
    const size_t first = lists_->first_list(c);
    const size_t from = std::max(begin, first), to = std::min(end, lists_->first_list(c + 1));
    if (from >= to) continue;
    const RowsView means =
        dense_rows(lists_->key_means(c) + (from - first) * dim * 2, to - from, dim, DType::f16);
    cpu::score_rows(*kernels_, means, rows_.data(), group_, nullptr, to - from,
                    scores_.data() + from, stride_);
    weigh(lists_->chunk(c), first, from, to, part);
  }
}

void ListChoice::weigh(const CodeChunk& chunk, size_t first, size_t from, size_t to,
                       uint32_t part) {
  // Maxima in eight lanes: one chain would wait for each comparison.
  constexpr size_t kLanes = 8;
  const float* spreads = chunk.spreads.data() + (from - first);
  const float* log_sizes = chunk.log_sizes.data() + (from - first);
  const size_t n = to - from;
  for (uint32_t h = 0; h < group_; ++h) {
    const float* scores = scores_.data() + h * stride_ + from;
    float* hopes = hopes_.data() + h * stride_ + from;
    float* expected = weights_.data() + h * stride_ + from;
    std::array<float, kLanes> tops, lows, logits;
    tops.fill(part_tops_[part][h]);
    lows.fill(part_lows_[part][h]);
    logits.fill(part_logits_[part][h]);
    const auto weigh_one = [&](size_t i, size_t lane, float logit, float slope_squared) {
      const float spread = slope_squared * norms_[h] * spreads[i];
      const float hope =
          spread <= kWidestSpread ? spread : kFar * std::sqrt(spread) - kWidestSpread;
      hopes[i] = logit + hope + log_sizes[i];
      // The mean weight of n rows whose logits vary by t is e^(t/2) more than that of their mean as long as many of
      // them make it up. From t = 2 ln n on the largest alone does, which grows with the root of t.
      const float many = 2.0F * log_sizes[i];
      expected[i] =
          logit + (spread <= many ? 0.5F * spread : std::sqrt(many * spread) - log_sizes[i]);
      tops[lane] = tops[lane] < hopes[i] ? hopes[i] : tops[lane];
      lows[lane] = hopes[i] < lows[lane] ? hopes[i] : lows[lane];
      logits[lane] = logits[lane] < logit ? logit : logits[lane];
    };
    size_t i = 0;
    if (logits_.softcap <= 0.0F) {
      const float scale = logits_.scale;
      for (; i + kLanes <= n; i += kLanes) {
        for (size_t lane = 0; lane < kLanes; ++lane) {
          weigh_one(i + lane, lane, scale * scores[i + lane], scale * scale);
        }
      }
    }
    for (; i < n; ++i) {
      const LogitSlope at = logit_slope(scores[i], logits_);
      weigh_one(i, 0, at.logit, at.slope_squared);
    }
    part_tops_[part][h] = *std::max_element(tops.begin(), tops.end());
    part_lows_[part][h] = *std::min_element(lows.begin(), lows.end());
    part_logits_[part][h] = *std::max_element(logits.begin(), logits.end());
  }
}

void ListChoice::choose(const ListGoal& goal) {
  const uint32_t parts = rank_parts(stride_);
  std::fill_n(gains_.begin(), stride_, kMinusInf);
  float most = kMinusInf;
  for (uint32_t h = 0; h < group_; ++h) {
    float top = kMinusInf, low = std::numeric_limits<float>::infinity();
    tops_[h] = kMinusInf;
    for (uint32_t p = 0; p < parts; ++p) {
      top = std::max(top, part_tops_[p][h]);
      low = std::min(low, part_lows_[p][h]);
      tops_[h] = std::max(tops_[h], part_logits_[p][h]);
    }
    // What is lighter still is as good as nothing.
    low = std::max(low, top - kDeepest);
    most_hoped_[h] = top;
    most = std::max(most, top - low);
    const float* hopes = hopes_.data() + h * stride_;
    for (size_t i = 0; i < stride_; ++i) {
      const float gain = hopes[i] - low;
      gains_[i] = gains_[i] < gain ? gain : gains_[i];
    }
  }
  RowsByGain rows;
  for (size_t c = 0, i = 0; c < lists_->chunks(); ++c) {
    for (const float size : lists_->chunk(c).sizes) rows.add(most - gains_[i++], size);
  }
  const size_t last = rows.last_within(static_cast<float>(goal.rows(lists_->count())));
  for (size_t c = 0, i = 0; c < lists_->chunks(); ++c) {
    for (const float size : lists_->chunk(c).sizes) {
      sizes_[i] = RowsByGain::bin_of(most - gains_[i]) <= last ? 0.0F : size;
      ++i;
    }
  }
  weigh_lists();
  if (goal.miss > 0.0F) choose_more(goal.miss);
  leave_out_chosen();
}

void ListChoice::weigh_lists() {
  for (size_t c = 0; c < lists_->chunks(); ++c) {
    const CodeChunk& chunk = lists_->chunk(c);
    float* weights = weights_.data() + lists_->first_list(c);
    // The logits of lists as scores of keys that do not vary.
    kernels_->weigh_partitions({.scores = weights,
                                .score_stride = stride_,
                                .group = group_,
                                .count = chunk.lists(),
                                .sizes = chunk.sizes.data(),
                                .variances = nullptr,
                                .square_norms = norms_,
                                .logits = {1.0F, 0.0F},
                                .caps = tops_,
                                .shifts = tops_,
                                .weights = weights,
                                .uncertainties = nullptr,
                                .out_stride = stride_});
  }
}

float ListChoice::largest_left(uint32_t head, float miss) const {
  const uint32_t dim = lists_->shape().dim;
  const float* o = means_.data() + size_t{head} * dim;
  float square = 0.0F;
  for (uint32_t j = 0; j < dim; ++j) square += o[j] * o[j];
  // The sums have the weight of all lists in them.
  return miss * std::sqrt(square / static_cast<float>(dim));
}

void ListChoice::choose_more(float miss) {
  // Each head by itself, from what all of them read so far: the order of heads is of no matter.
  std::array<float, kMaxGroup> lefts, little;
  bool any = false;
  for (uint32_t h = 0; h < group_; ++h) {
    const WeightSums sums(weights_.data() + h * stride_, sizes_.data(), stride_);
    lefts[h] = sums.left;
    little[h] = kLittle * sums.all;
    any = any || !(lefts[h] <= little[h]);
  }
  if (!any) return;
  add_values();
  std::array<uint32_t, kMaxGroup> heads;
  std::array<size_t, kMaxGroup> last;
  uint32_t lacking = 0;
  for (uint32_t h = 0; h < group_; ++h) {
    const float most = std::max(largest_left(h, miss), little[h]);
    if (lefts[h] <= most) continue;
    const float* weights = weights_.data() + h * stride_;
    const float* hopes = hopes_.data() + h * stride_;
    WeightByHope left;
    for (size_t i = 0; i < stride_; ++i) {
      if (sizes_[i] != 0.0F) left.add(most_hoped_[h] - hopes[i], weights[i]);
    }
    heads[lacking] = h;
    last[lacking++] = left.first_before(most);
  }
  for (uint32_t l = 0; l < lacking; ++l) {
    const float* hopes = hopes_.data() + heads[l] * stride_;
    const float top = most_hoped_[heads[l]];
    for (size_t i = 0; i < stride_; ++i) {
      if (WeightByHope::bin_of(top - hopes[i]) <= last[l]) sizes_[i] = 0.0F;
    }
  }
}

void ListChoice::add_values() {
  const uint32_t dim = lists_->shape().dim;
  std::fill_n(means_.begin(), size_t{group_} * dim, 0.0F);
  for (size_t c = 0; c < lists_->chunks(); ++c) {
    const size_t first = lists_->first_list(c), n = lists_->chunk(c).lists();
    kernels_->weighted_sum[kHalf]({.weights = weights_.data() + first,
                                   .weight_stride = stride_,
                                   .group = group_,
                                   .values = dense_rows(lists_->value_means(c), n, dim, DType::f16),
                                   .ids = nullptr,
                                   .count = n,
                                   .o = means_.data()});
  }
}

void ListChoice::leave_out_chosen() {
  for (uint32_t h = 0; h < group_; ++h) {
    float* weights = weights_.data() + h * stride_;
    for (size_t i = 0; i < stride_; ++i) weights[i] = sizes_[i] != 0.0F ? weights[i] : 0.0F;
  }
  chosen_count_ = 0;
  float read = 0.0F;
  for (size_t c = 0, i = 0; c < lists_->chunks(); ++c) {
    for (const float size : lists_->chunk(c).sizes) {
      const bool is_read = sizes_[i] == 0.0F;
      chosen_[chosen_count_] = static_cast<uint32_t>(i);
      chosen_count_ += is_read ? 1 : 0;
      read += is_read ? size : 0.0F;
      ++i;
    }
  }
  chosen_rows_ = static_cast<size_t>(read);
}

float largest_of(std::span<const float> x) {
  constexpr size_t kLanes = 8;  // one chain would wait for each comparison
  std::array<float, kLanes> most{};
  size_t i = 0;
  for (; i + kLanes <= x.size(); i += kLanes) {
    for (size_t lane = 0; lane < kLanes; ++lane) {
      most[lane] = most[lane] < x[i + lane] ? x[i + lane] : most[lane];
    }
  }
  for (; i < x.size(); ++i) most[0] = std::max(most[0], x[i]);
  return *std::max_element(most.begin(), most.end());
}

bool ListChoice::may_widen(const float* least, float wide, float deviations) const {
  float widest = 0.0F;
  for (size_t c = 0; c < lists_->chunks(); ++c) {
    widest = std::max(widest, largest_of(lists_->chunk(c).widest));
  }
  bool any_wide = false, any_reach = false;
  for (uint32_t h = 0; h < group_; ++h) {
    const float variance = logits_.scale * logits_.scale * norms_[h] * widest;
    any_wide = any_wide || variance > wide;
    // Most heads are settled by their largest mean and the longest row of all lists. What is no number may reach all.
    const float far = deviations * std::sqrt(variance), cap = logits_.softcap;
    any_reach = any_reach || !(uncapped_logit(tops_[h], cap) + far < uncapped_logit(least[h], cap));
  }
  if (!any_wide || !any_reach) return false;
  float bounds[kMaxGroup];
  for (uint32_t h = 0; h < group_; ++h) bounds[h] = cpu::score_of(least[h], logits_);
  for (size_t c = 0, i = 0; c < lists_->chunks(); ++c) {
    const CodeChunk& chunk = lists_->chunk(c);
    for (size_t l = 0; l < chunk.lists(); ++l, ++i) {
      if (sizes_[i] != 0.0F && reaches(chunk, l, i, bounds, deviations)) return true;
    }
  }
  return false;
}

bool ListChoice::widen(const float* least, float deviations) {
  float bounds[kMaxGroup];
  for (uint32_t h = 0; h < group_; ++h) bounds[h] = cpu::score_of(least[h], logits_);
  const size_t before = chosen_count_;
  for (size_t c = 0, i = 0; c < lists_->chunks(); ++c) {
    const CodeChunk& chunk = lists_->chunk(c);
    for (size_t l = 0; l < chunk.lists(); ++l, ++i) {
      if (sizes_[i] != 0.0F && reaches(chunk, l, i, bounds, deviations)) sizes_[i] = 0.0F;
    }
  }
  leave_out_chosen();
  return chosen_count_ != before;
}

}  // namespace keyhole::index

// What a goal allows to be missing, and which partitions to look at closer until it is met.
#include "index/tail/tail_estimate.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "index/scan/topk.h"

namespace keyhole::index {
namespace {

// The square root of the uncertainties' sum counts errors of partitions as independent and values as random. Measured
// on trained heads, the true error is 2 to 4 times that in the median and 6 in the 95th percentile.
constexpr float kErrorFactor = 4.0F;

// How many partitions are looked at closer before the goal is checked again.
constexpr size_t kRound = 64;

// How many rows are read before their true weights are taken in.
constexpr size_t kRowsAtOnce = 1024;

// What dividing a coarse partition costs, in rows per fine partition: a code of a mean key beside K and V of a key.
constexpr float kRowsPerMean = 0.25F;

}  // namespace

float TailEstimate::missing(uint32_t head) const {
  const double all = seen_[head] + unread_[head];
  return all > 0.0 ? static_cast<float>(unread_[head] / all) : 0.0F;
}

float TailEstimate::error(uint32_t head, float out_norm) const {
  const double all = seen_[head] + unread_[head];
  if (!(all > 0.0) || !(uncertainty_sums_[head] > 0.0)) return 0.0F;
  const double off =
      kErrorFactor * std::sqrt(uncertainty_sums_[head] * tree_->value_spread()) / all;
  return static_cast<float>(std::min(off / std::max(double{out_norm}, 1e-30), 1e30));
}

struct TailEstimate::Limits {
  double uncertainty
      [kMaxGroup];  ///< sum of uncertainties that the head's error allows; infinite: no such goal
  double unread[kMaxGroup];  ///< sum of weights that may stay unread; likewise
  bool too_uncertain[kMaxGroup], too_much_unread[kMaxGroup];
  bool any_exceeded = false;
  bool is_met = false;
};

TailEstimate::Limits TailEstimate::limits(const ReadGoal& goal, size_t rows,
                                          const float* out_norms) const {
  Limits l;
  for (uint32_t h = 0; h < query_.group; ++h) {
    const double all = seen_[h] + unread_[h];
    l.uncertainty[h] = l.unread[h] = std::numeric_limits<double>::infinity();
    if (goal.error > 0.0F) {
      const double spread = std::sqrt(double{tree_->value_spread()});
      const double allowed = goal.error * double{out_norms[h]} * all / (kErrorFactor * spread);
      l.uncertainty[h] = allowed * allowed;  // infinite where all values are alike
    }
    if (goal.mass > 0.0F) l.unread[h] = (1.0 - double{goal.mass}) * all;
    l.too_uncertain[h] = uncertainty_sums_[h] > l.uncertainty[h];
    l.too_much_unread[h] = unread_[h] > l.unread[h];
    l.any_exceeded = l.any_exceeded || l.too_uncertain[h] || l.too_much_unread[h];
  }
  l.is_met = !l.any_exceeded && rows >= goal.min_rows;
  return l;
}

bool TailEstimate::met(const ReadGoal& goal, size_t rows, const float* out_norms) const {
  return limits(goal, rows, out_norms).is_met;
}

void TailEstimate::rate(const Limits& limits) {
  float per_uncertainty[kMaxGroup];
  float per_weight[kMaxGroup];
  for (uint32_t h = 0; h < query_.group; ++h) {
    per_uncertainty[h] = limits.too_uncertain[h]
                             ? static_cast<float>(1.0 / std::max(limits.uncertainty[h], 1e-30))
                             : 0;
    per_weight[h] =
        limits.too_much_unread[h] ? static_cast<float>(1.0 / std::max(limits.unread[h], 1e-15)) : 0;
    if (limits.any_exceeded) continue;
    // Only more rows are wanted: those whose weights are the least certain.
    const double all = seen_[h] + unread_[h];
    per_uncertainty[h] = all > 0.0 ? static_cast<float>(std::min(1.0 / (all * all), 1e30)) : 0.0F;
  }
  for (size_t p = 0; p < count_; ++p) {
    if (sizes_[p] == 0.0F) {
      merits_[p] = 0.0F;
      continue;
    }
    float merit = 1e-30F;  // so that rows are found even where no partition has a merit above 0
    for (uint32_t h = 0; h < query_.group; ++h) {
      merit += uncertainties_[h * capacity_ + p] * per_uncertainty[h] +
               weights_[h * capacity_ + p] * per_weight[h];
    }
    const float cost =
        p >= coarse_
            ? sizes_[p]
            : kRowsPerMean * static_cast<float>(tree_->fine_begin(p + 1) - tree_->fine_begin(p));
    merits_[p] = std::min(merit / cost, 1e30F);
  }
}

size_t TailEstimate::open(size_t position, uint32_t* rows) {
  for (uint32_t h = 0; h < query_.group; ++h) {
    float& weight = weights_[h * capacity_ + position];
    float& uncertainty = uncertainties_[h * capacity_ + position];
    unread_[h] = std::max(unread_[h] - double{weight}, 0.0);
    uncertainty_sums_[h] = std::max(uncertainty_sums_[h] - double{uncertainty}, 0.0);
    weight = uncertainty = 0.0F;
  }
  sizes_[position] = 0.0F;
  size_t n = 0;
  for (const uint32_t row : tree_->rows_of(fine_at(position))) {
    if (!marks_.contains(row)) rows[n++] = row;
  }
  return n;
}

std::span<const uint32_t> TailEstimate::next_rows(const ReadGoal& goal, size_t already,
                                                  const float* out_norms) {
  if (!is_marked_) {
    marks_.begin(tree_->count());
    for (const uint32_t row : read_.rows) marks_.insert(row);
    is_marked_ = true;
  }
  size_t found = 0;
  bool full = false;
  while (!full && already + found < goal.max_rows && found < kRowsAtOnce) {
    const Limits now = limits(goal, already + found, out_norms);
    if (now.is_met) break;
    rate(now);
    const auto candidates = best(count_, kRound);
    if (candidates.empty()) break;
    sort_ranks(candidates.data(), spare_.data(), candidates.size());
    const size_t old_count = count_;
    for (const uint64_t r : candidates) {
      const size_t p = rank_row(r);
      if (p < coarse_) {
        divide(static_cast<uint32_t>(p));
        continue;
      }
      full = already + found + static_cast<size_t>(sizes_[p]) > goal.max_rows;
      if (full) break;
      found += open(p, rows_.data() + found);
      if (count_ == old_count && met(goal, already + found, out_norms)) break;
    }
    if (count_ == old_count) continue;
    finish_scores(old_count);
    weigh(raise_shifts(old_count) ? 0 : old_count, count_);
    add_up();
  }
  bytes_read_ += found * sizeof(uint32_t);
  return {rows_.data(), found};
}

void TailEstimate::take_in(const float* seen_lse) {
  for (uint32_t h = 0; h < query_.group; ++h) {
    seen_lse_[h] = std::isfinite(seen_lse[h]) ? seen_lse[h] : kMinusInf;
    const double above = double{seen_lse_[h]} - double{shifts_[h]};
    seen_[h] = seen_lse_[h] == kMinusInf ? 0.0 : std::exp(std::min(above, 300.0));
  }
}

}  // namespace keyhole::index

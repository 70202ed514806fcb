#include "index/tail/tail_estimate.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "index/scan/topk.h"

namespace keyhole::index {
namespace {

// Of the coarse partitions, so many are divided in a step, those of the largest doubts first: a sixteenth, at
// least 16 and at most 64. Beside a search that has found the best 50 keys, three times as many gain 1 % of the
// error on heads with 32k keys; targets divide what they need.
constexpr size_t kDividedShare = 16;
constexpr size_t kLeastDivided = 16;
constexpr size_t kMostDivided = 64;

// A partition below this share of a head's mass gives its mass to the mean value of all: reading its own mean
// value (256 bytes in fp16) changes the output by less than this share. 2e-4 reads half as many bytes more and
// leaves the same error, 2e-3 leaves 3 % more.
constexpr float kLeastShare = 1e-3F;

// The square root of the doubts' sum counts errors of partitions as independent and values as random. Measured
// on trained heads, the true error is 2 to 4 times that in the median and 6 in the 95th percentile.
constexpr float kErrorFactor = 4.0F;

// So many partitions are looked at closer before the goal is looked at again.
constexpr size_t kRound = 64;

// And so many rows are read before their true weights are taken in.
constexpr size_t kRowsAtOnce = 1024;

// What dividing a coarse partition costs, in rows per fine partition: a code of a mean key beside K and V of a key.
constexpr float kRowsPerMean = 0.25F;

// Reads ahead that hide the latency of scattered row numbers, and of the fine means of one coarse partition
// (8 codes of 128 bytes): at 128k keys they halve the time of begin().
constexpr size_t kRowsAhead = 16;
constexpr size_t kDivisionsAhead = 2;
constexpr size_t kCacheLine = 64;

void prefetch(const void* data, size_t bytes) {
  const auto* p = static_cast<const std::byte*>(data);
  for (size_t i = 0; i < bytes; i += kCacheLine) __builtin_prefetch(p + i);
}

double sum_of(const float* x, size_t n) {
  constexpr size_t kSums = 8;
  float sums[kSums] = {};
  size_t i = 0;
  for (; i + kSums <= n; i += kSums) {
    for (size_t j = 0; j < kSums; ++j) sums[j] += x[i + j];
  }
  double sum = 0.0;
  for (; i < n; ++i) sum += x[i];
  for (const float s : sums) sum += s;
  return sum;
}

}  // namespace

bool TailEstimate::has_room(const TailTree& tree, uint32_t group) const {
  return group <= group_room_ && tree.coarse().count() + tree.fine().count() <= room_ &&
         tree.count() <= rows_.size();
}

void TailEstimate::reserve(const TailTree& tree, uint32_t group) {
  if (has_room(tree, group)) return;
  const size_t room = tree.coarse().count() + tree.fine().count();
  if (room > room_ || group > group_room_) {
    if (room > room_) room_ = room + room / 4;  // trees grow in steps
    group_room_ = std::max(group, group_room_);
    for (auto* v : {&scores_, &weights_, &doubts_, &removed_scores_, &kept_weights_}) {
      v->assign(group_room_ * room_, 0.0F);
    }
    for (auto* v : {&sizes_, &variances_, &removed_, &merits_}) v->assign(room_, 0.0F);
    for (auto* v : {&fine_ids_, &touched_, &ids_, &base_}) v->assign(room_, 0U);
    for (auto* v : {&ranks_, &spare_}) v->assign(room_, 0U);
  }
  if (tree.count() > rows_.size()) {
    const size_t rows = tree.count() + tree.count() / 4;
    rows_.resize(rows);
    for (auto* v : {&read_ids_, &read_fine_, &read_coarse_}) v->resize(rows);
    marks_.reserve(rows);
  }
  read_weights_.resize(group_room_ * rows_.size());
}

void TailEstimate::score(const int8_t* codes, size_t at, size_t n) {
  tree_->codes().score(codes_, codes, nullptr, n, scores_.data() + at, room_);
  bytes_read_ += n * (tree_->dim() + 2 * sizeof(float));
}

void TailEstimate::finish_scores(size_t begin) {
  for (uint32_t h = 0; h < query_.group; ++h) {
    float* s = scores_.data() + h * room_;
    for (size_t p = begin; p < count_; ++p) s[p] += center_scores_[h];
  }
  subtract(begin);
}

void TailEstimate::begin(const TailTree& tree, const cpu::Kernels& kernels, const TailQuery& query,
                         const ReadRows& read) {
  tree_ = &tree;
  kernels_ = &kernels;
  query_ = query;
  read_ = read;
  bytes_read_ = 0;
  is_marked_ = false;
  coarse_ = count_ = tree.coarse().count();
  const uint32_t dim = tree.dim();
  if (coarse_ != 0) tree.codes().encode_queries(query.queries, query.group, codes_);
  for (uint32_t h = 0; h < query.group; ++h) {
    const float* q = query.queries + size_t{h} * dim;
    center_scores_[h] = coarse_ != 0 ? tree.codes().center_score(q) : 0.0F;
    double squares[4] = {};
    for (uint32_t j = 0; j < dim; j += 4) {
      for (uint32_t i = 0; i < 4; ++i) squares[i] += double{q[j + i]} * q[j + i];
    }
    square_norms_[h] =
        static_cast<float>(std::min((squares[0] + squares[1]) + (squares[2] + squares[3]), 1e30));
  }
  if (coarse_ != 0) score(tree.coarse().keys.data(), 0, coarse_);
  std::copy_n(tree.coarse().sizes.data(), coarse_, sizes_.data());
  std::copy_n(tree.coarse().variances.data(), coarse_, variances_.data());
  std::fill_n(base_.data(), coarse_, 0U);

  for (uint32_t h = 0; h < query.group; ++h) {
    const bool has_seen = std::isfinite(query.seen_lse[h]);
    // Four standard deviations: one mean in ten thousand is further off.
    margins_[h] = 0.0F;
    if (coarse_ != 0) {
      const double spread = tree.codes().error_spread(query.queries + size_t{h} * dim);
      margins_[h] = static_cast<float>(std::min(4.0 * spread * query.logits.scale, 1e30));
    }
    seen_lse_[h] = has_seen ? query.seen_lse[h] : kMinusInf;
    shifts_[h] = kMinusInf;
    caps_[h] = query.caps != nullptr ? std::min(query.caps[h], seen_lse_[h]) : seen_lse_[h];
  }
  place_read();
  finish_scores(0);
  raise_shifts(0);
  weigh(0, coarse_);
  add_up();
  divide_best();
}

void TailEstimate::place_read() {
  const size_t n = read_.rows.size();
  for (size_t i = 0; i < std::min(n, kRowsAhead); ++i) tree_->prefetch_fine_of(read_.rows[i]);
  for (size_t i = 0; i < n; ++i) {
    if (i + kRowsAhead < n) tree_->prefetch_fine_of(read_.rows[i + kRowsAhead]);
    read_fine_[i] = tree_->fine_of(read_.rows[i]);
  }
  for (size_t i = 0; i < n; ++i) read_coarse_[i] = tree_->parent(read_fine_[i]);
  bytes_read_ += n * 2 * sizeof(uint32_t);
}

size_t TailEstimate::position_of_read(size_t i) const {
  const uint32_t coarse = read_coarse_[i];
  return base_[coarse] == 0 ? coarse : base_[coarse] + read_fine_[i] - tree_->fine_begin(coarse);
}

void TailEstimate::subtract(size_t first_position) {
  const uint32_t group = query_.group;
  float limits[kMaxGroup];
  for (uint32_t h = 0; h < query_.group; ++h) {
    // A soft-cap is a cap, too.
    const bool capped = query_.logits.softcap == 0.0F && seen_lse_[h] != kMinusInf;
    limits[h] = capped ? (caps_[h] + margins_[h]) / query_.logits.scale
                       : std::numeric_limits<float>::infinity();
  }
  size_t touched = 0;
  for (size_t i = 0; i < read_.rows.size(); ++i) {
    const size_t p = position_of_read(i);
    if (p < first_position) continue;
    if (removed_[p] == 0.0F) touched_[touched++] = static_cast<uint32_t>(p);
    removed_[p] += 1.0F;
    float* scores = removed_scores_.data() + p * group;
    for (uint32_t h = 0; h < group; ++h) scores[h] += read_.scores[h * read_.stride + i];
  }
  for (size_t i = 0; i < touched; ++i) {
    const size_t p = touched_[i];
    const float left = sizes_[p] - removed_[p];
    float* removed = removed_scores_.data() + p * group;
    for (uint32_t h = 0; h < group; ++h) {
      float& score = scores_[h * room_ + p];
      // What is left of a partition carries the error of its mean's code many times over: there the cap holds.
      if (left > 0.5F) score = std::min((score * sizes_[p] - removed[h]) / left, limits[h]);
      removed[h] = 0.0F;
    }
    sizes_[p] = left > 0.5F ? left : 0.0F;
    removed_[p] = 0.0F;
  }
}

bool TailEstimate::raise_shifts(size_t begin) {
  bool raised = false;
  for (uint32_t h = 0; h < query_.group; ++h) {
    float largest = kMinusInf;
    for (size_t p = begin; p < count_; ++p) {
      const float score = scores_[h * room_ + p];
      if (sizes_[p] != 0.0F && score > largest) largest = score;
    }
    const float scaled = largest * query_.logits.scale;
    const float cap = query_.logits.softcap;
    const float logit = cap > 0.0F ? cap * std::tanh(scaled / cap) : scaled;
    const bool has_seen = seen_lse_[h] != kMinusInf;
    float shift = std::isfinite(logit) ? logit - (has_seen ? margins_[h] : 0.0F) : kMinusInf;
    shift = std::max(seen_lse_[h], shift);
    if (shift == kMinusInf && shifts_[h] == kMinusInf) shift = 0.0F;
    if (shift <= shifts_[h]) continue;
    shifts_[h] = shift;
    if (!has_seen) caps_[h] = shift;  // no key is believed to be above the best mean
    seen_[h] = seen_lse_[h] == kMinusInf ? 0.0 : std::exp(double{seen_lse_[h]} - double{shift});
    raised = true;
  }
  return raised;
}

void TailEstimate::weigh(size_t begin, size_t end) {
  if (begin == end) return;
  cpu::PartitionArgs args = {.scores = scores_.data() + begin,
                             .score_stride = room_,
                             .group = query_.group,
                             .count = end - begin,
                             .sizes = sizes_.data() + begin,
                             .variances = variances_.data() + begin,
                             .square_norms = square_norms_,
                             .logits = query_.logits,
                             .caps = caps_,
                             .margins = margins_,
                             .shifts = shifts_,
                             .weights = weights_.data() + begin,
                             .doubts = doubts_.data() + begin,
                             .out_stride = room_};
  kernels_->weigh_partitions(args);
  if (query_.mode != TailMode::centroid) return;
  args.variances = nullptr;
  args.doubts = nullptr;
  kernels_->weigh_partitions(args);
}

void TailEstimate::add_up() {
  for (uint32_t h = 0; h < query_.group; ++h) {
    unread_[h] = sum_of(weights_.data() + h * room_, count_);
    doubts_sum_[h] = sum_of(doubts_.data() + h * room_, count_);
  }
}

void TailEstimate::divide(uint32_t coarse) {
  const uint32_t first = tree_->fine_begin(coarse);
  const size_t n = tree_->fine_begin(coarse + 1) - first;
  base_[coarse] = static_cast<uint32_t>(count_);
  score(tree_->fine().keys.data() + size_t{first} * tree_->dim(), count_, n);
  std::copy_n(tree_->fine().sizes.data() + first, n, sizes_.data() + count_);
  std::copy_n(tree_->fine().variances.data() + first, n, variances_.data() + count_);
  for (size_t i = 0; i < n; ++i) {
    fine_ids_[count_ - coarse_ + i] = first + static_cast<uint32_t>(i);
  }
  count_ += n;
  sizes_[coarse] = 0.0F;
  for (uint32_t h = 0; h < query_.group; ++h) {
    weights_[h * room_ + coarse] = 0.0F;
    doubts_[h * room_ + coarse] = 0.0F;
  }
}

std::span<uint64_t> TailEstimate::best(size_t count, size_t most) {
  size_t n = 0;
  for (size_t p = 0; p < count; ++p) {
    ranks_[n] = pack_rank(merits_[p], static_cast<uint32_t>(p));
    n += static_cast<size_t>(merits_[p] > 0.0F);
  }
  most = std::min(most, n);
  select_ranks(ranks_.data(), n, most);
  return {ranks_.data(), most};
}

void TailEstimate::divide_best() {
  const size_t wanted =
      std::clamp(coarse_ / kDividedShare, std::min(coarse_, kLeastDivided), kMostDivided);
  std::fill_n(merits_.data(), coarse_, 0.0F);
  for (uint32_t h = 0; h < query_.group; ++h) {
    const double all = seen_[h] + unread_[h];
    // Bounded, because 0 times infinity is no merit.
    const float scale = all > 0.0 ? static_cast<float>(std::min(1.0 / (all * all), 1e30)) : 0.0F;
    const float* doubts = doubts_.data() + h * room_;
    for (size_t c = 0; c < coarse_; ++c) merits_[c] += doubts[c] * scale;
  }
  const auto chosen = best(coarse_, wanted);
  const auto ahead = [&](size_t i) {
    if (i >= chosen.size()) return;
    const size_t first = tree_->fine_begin(rank_row(chosen[i]));
    const size_t n = tree_->fine_begin(rank_row(chosen[i]) + 1) - first;
    prefetch(tree_->fine().keys.data() + first * tree_->dim(), n * tree_->dim());
    prefetch(tree_->fine().sizes.data() + first, n * sizeof(float));
    prefetch(tree_->fine().variances.data() + first, n * sizeof(float));
  };
  for (size_t i = 0; i < kDivisionsAhead; ++i) ahead(i);
  for (size_t i = 0; i < chosen.size(); ++i) {
    ahead(i + kDivisionsAhead);
    divide(rank_row(chosen[i]));
  }
  finish_scores(coarse_);
  weigh(raise_shifts(coarse_) ? 0 : coarse_, count_);
  add_up();
}

// ---- Goals -----------------------------------------------------------------------------------------

struct TailEstimate::Wishes {
  double doubts[kMaxGroup];  ///< that a head may have at most
  double unread[kMaxGroup];
  bool doubts_unmet[kMaxGroup], unread_unmet[kMaxGroup];
  bool any_unmet = false;
};

TailEstimate::Wishes TailEstimate::wishes(const ReadGoal& goal, size_t rows,
                                          const float* out_norms) const {
  Wishes w;
  for (uint32_t h = 0; h < query_.group; ++h) {
    const double all = seen_[h] + unread_[h];
    w.doubts[h] = w.unread[h] = std::numeric_limits<double>::infinity();
    if (goal.error > 0.0F) {
      const double spread = std::sqrt(double{tree_->value_spread()});
      const double allowed = goal.error * double{out_norms[h]} * all / (kErrorFactor * spread);
      w.doubts[h] = allowed * allowed;  // infinite where all values are alike
    }
    if (goal.mass > 0.0F) w.unread[h] = (1.0 - double{goal.mass}) * all;
    w.doubts_unmet[h] = doubts_sum_[h] > w.doubts[h];
    w.unread_unmet[h] = unread_[h] > w.unread[h];
    w.any_unmet = w.any_unmet || w.doubts_unmet[h] || w.unread_unmet[h];
  }
  w.any_unmet = w.any_unmet || rows < goal.min_rows;
  return w;
}

bool TailEstimate::met(const ReadGoal& goal, size_t rows, const float* out_norms) const {
  return !wishes(goal, rows, out_norms).any_unmet;
}

void TailEstimate::open(size_t position) {
  for (uint32_t h = 0; h < query_.group; ++h) {
    float& weight = weights_[h * room_ + position];
    float& doubt = doubts_[h * room_ + position];
    unread_[h] = std::max(unread_[h] - double{weight}, 0.0);
    doubts_sum_[h] = std::max(doubts_sum_[h] - double{doubt}, 0.0);
    weight = doubt = 0.0F;
  }
  sizes_[position] = 0.0F;
}

std::span<const uint32_t> TailEstimate::next_rows(const ReadGoal& goal, size_t already,
                                                  const float* out_norms) {
  if (!is_marked_) {
    marks_.begin(tree_->count());
    for (const uint32_t row : read_.rows) marks_.insert(row);
    is_marked_ = true;
  }
  size_t found = 0;
  while (already + found < goal.max_rows) {
    Wishes w = wishes(goal, already + found, out_norms);
    if (!w.any_unmet || found >= kRowsAtOnce) break;
    // What a row read, or its equivalent, is worth: by how much it brings unmet wishes nearer.
    float for_doubts[kMaxGroup];
    float for_weights[kMaxGroup];
    bool any = false;
    for (uint32_t h = 0; h < query_.group; ++h) {
      for_doubts[h] =
          w.doubts_unmet[h] ? static_cast<float>(1.0 / std::max(w.doubts[h], 1e-30)) : 0;
      for_weights[h] =
          w.unread_unmet[h] ? static_cast<float>(1.0 / std::max(w.unread[h], 1e-15)) : 0;
      any = any || w.doubts_unmet[h] || w.unread_unmet[h];
    }
    for (uint32_t h = 0; h < query_.group && !any; ++h) {  // only more rows are wanted
      const double all = seen_[h] + unread_[h];
      for_doubts[h] = all > 0.0 ? static_cast<float>(std::min(1.0 / (all * all), 1e30)) : 0.0F;
    }
    for (size_t p = 0; p < count_; ++p) {
      if (sizes_[p] == 0.0F) {
        merits_[p] = 0.0F;
        continue;
      }
      float merit =
          1e-30F;  // where no partition is worth anything, wished-for rows are still found
      for (uint32_t h = 0; h < query_.group; ++h) {
        merit += doubts_[h * room_ + p] * for_doubts[h] + weights_[h * room_ + p] * for_weights[h];
      }
      const float cost =
          p >= coarse_
              ? sizes_[p]
              : kRowsPerMean * static_cast<float>(tree_->fine_begin(p + 1) - tree_->fine_begin(p));
      merits_[p] = std::min(merit / cost, 1e30F);
    }
    const auto candidates = best(count_, kRound);
    if (candidates.empty()) break;
    sort_ranks(candidates.data(), spare_.data(), candidates.size());
    const size_t old_count = count_;
    bool full = false;
    for (const uint64_t r : candidates) {
      const size_t p = rank_row(r);
      if (p < coarse_) {
        divide(static_cast<uint32_t>(p));
        continue;
      }
      if (already + found + static_cast<size_t>(sizes_[p]) > goal.max_rows) {
        full = true;
        break;
      }
      open(p);
      for (const uint32_t row : tree_->rows_of(fine_at(p))) {
        if (!marks_.contains(row)) rows_[found++] = row;
      }
      if (count_ == old_count && !wishes(goal, already + found, out_norms).any_unmet) break;
    }
    if (count_ != old_count) {
      finish_scores(old_count);
      weigh(raise_shifts(old_count) ? 0 : old_count, count_);
      add_up();
    }
    if (full) break;
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

// ---- The state -------------------------------------------------------------------------------------

bool TailEstimate::keeps(size_t position) const {
  for (uint32_t h = 0; h < query_.group; ++h) {
    if (weights_[h * room_ + position] > least_[h]) return true;
  }
  return false;
}

void TailEstimate::state(const RowsView& values, StateView out) {
  const uint32_t dim = tree_->dim();
  const uint32_t group = query_.group;
  const auto type = static_cast<size_t>(tree_->dtype());
  const size_t row_bytes = dim * dtype_size(tree_->dtype());
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
        const float weight = weights_[h * room_ + p];
        kept_weights_[h * room_ + kept] = weight * whole;
        rest[h] -= weight;
      }
      ids_[kept++] = static_cast<uint32_t>(id);
    }
    if (kept == 0) return;
    kernels_->weighted_sum[type]({.weights = kept_weights_.data(),
                                  .weight_stride = room_,
                                  .group = group,
                                  .dim = dim,
                                  .values = level.values.data(),
                                  .value_stride = row_bytes,
                                  .ids = ids_.data(),
                                  .count = kept,
                                  .o = out.o});
    bytes_read_ += kept * row_bytes;
  };
  if (own_means) {
    sum(tree_->coarse(), 0, coarse_);
    sum(tree_->fine(), coarse_, count_);
    // The values that were read leave the means of what is left.
    const size_t stride = rows_.size();
    size_t leaving = 0;
    for (size_t i = 0; i < read_.rows.size(); ++i) {
      const size_t p = position_of_read(i);
      if (sizes_[p] == 0.0F || !keeps(p)) continue;
      for (uint32_t h = 0; h < group; ++h) {
        read_weights_[h * stride + leaving] = -weights_[h * room_ + p] / sizes_[p];
      }
      read_ids_[leaving++] = read_.rows[i];
    }
    if (leaving != 0) {
      kernels_->weighted_sum[type]({.weights = read_weights_.data(),
                                    .weight_stride = stride,
                                    .group = group,
                                    .dim = dim,
                                    .values = values.data,
                                    .value_stride = values.stride,
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

float TailEstimate::missing(uint32_t head) const {
  const double all = seen_[head] + unread_[head];
  return all > 0.0 ? static_cast<float>(unread_[head] / all) : 0.0F;
}

float TailEstimate::error(uint32_t head, float out_norm) const {
  const double all = seen_[head] + unread_[head];
  if (!(all > 0.0) || !(doubts_sum_[head] > 0.0)) return 0.0F;
  const double off = kErrorFactor * std::sqrt(doubts_sum_[head] * tree_->value_spread()) / all;
  return static_cast<float>(std::min(off / std::max(double{out_norm}, 1e-30), 1e30));
}

size_t TailEstimate::bytes() const {
  return (scores_.size() + weights_.size() + doubts_.size() + removed_scores_.size() +
          kept_weights_.size() + sizes_.size() + variances_.size() + removed_.size() +
          merits_.size() + read_weights_.size()) *
             sizeof(float) +
         (fine_ids_.size() + touched_.size() + ids_.size() + base_.size() + rows_.size() +
          read_ids_.size() + read_fine_.size() + read_coarse_.size()) *
             sizeof(uint32_t) +
         (ranks_.size() + spare_.size()) * sizeof(uint64_t) + rows_.size() * sizeof(uint16_t);
}

}  // namespace keyhole::index

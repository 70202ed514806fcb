#include "index/tail/tail_estimate.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/attention_state.h"
#include "index/grow.h"
#include "index/scan/topk.h"

namespace keyhole::index {
namespace {

// The share of the coarse partitions, those of the largest uncertainties, that a step divides first: a sixteenth, but
// at least 16 and at most 64. Beside a search that has found the best 50 keys, dividing three times as many reduces
// the error by 1 % on heads with 32k keys; targets divide what they need.
constexpr size_t kDividedShare = 16;
constexpr size_t kLeastDivided = 16;
constexpr size_t kMostDivided = 64;

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

bool TailEstimate::fits(const TailTree& tree, uint32_t group) const {
  return group <= group_capacity_ && tree.coarse().count() + tree.fine().count() <= capacity_ &&
         tree.count() <= row_capacity_;
}

void TailEstimate::reserve(const TailTree& tree, uint32_t group) {
  if (fits(tree, group)) return;
  // Trees grow in steps: a quarter more than now. Capacities last: an array that has grown alone does no harm.
  const size_t partitions = tree.coarse().count() + tree.fine().count();
  const size_t capacity = partitions > capacity_ ? partitions + partitions / 4 : capacity_;
  const size_t rows =
      tree.count() > row_capacity_ ? tree.count() + tree.count() / 4 : row_capacity_;
  const uint32_t heads = std::max(group, group_capacity_);
  for (auto* v : {&scores_, &weights_, &uncertainties_, &removed_scores_, &kept_weights_}) {
    grow(*v, heads * capacity);
  }
  for (auto* v : {&sizes_, &variances_, &removed_, &merits_}) grow(*v, capacity);
  for (auto* v : {&fine_ids_, &touched_, &ids_, &base_}) grow(*v, capacity);
  for (auto* v : {&ranks_, &spare_}) grow(*v, capacity);
  for (auto* v : {&rows_, &read_ids_, &read_fine_, &read_coarse_}) grow(*v, rows);
  grow(read_weights_, heads * rows);
  marks_.reserve(rows);
  capacity_ = capacity;
  row_capacity_ = rows;
  group_capacity_ = heads;
}

void TailEstimate::score(const int8_t* codes, size_t at, size_t n) {
  tree_->codes().score(codes_, codes, nullptr, n, scores_.data() + at, capacity_);
  bytes_read_ += n * (tree_->dim() + 2 * sizeof(float));
}

void TailEstimate::finish_scores(size_t begin) {
  for (uint32_t h = 0; h < query_.group; ++h) {
    float* s = scores_.data() + h * capacity_;
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
    // In the space in which the tree has taken variances.
    const float* scale = tree.query_scale().data();
    double squares[4] = {};
    for (uint32_t j = 0; j < dim; j += 4) {
      for (uint32_t i = 0; i < 4; ++i) {
        const double x = double{q[j + i]} * scale[j + i];
        squares[i] += x * x;
      }
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
      float& score = scores_[h * capacity_ + p];
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
      const float score = scores_[h * capacity_ + p];
      if (sizes_[p] != 0.0F && score > largest) largest = score;
    }
    const float logit = cpu::logit_of(largest, query_.logits);
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
                             .score_stride = capacity_,
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
                             .uncertainties = uncertainties_.data() + begin,
                             .out_stride = capacity_};
  kernels_->weigh_partitions(args);
  if (query_.mode != TailMode::centroid) return;
  args.variances = nullptr;
  args.uncertainties = nullptr;
  kernels_->weigh_partitions(args);
}

void TailEstimate::add_up() {
  for (uint32_t h = 0; h < query_.group; ++h) {
    unread_[h] = sum_of(weights_.data() + h * capacity_, count_);
    uncertainty_sums_[h] = sum_of(uncertainties_.data() + h * capacity_, count_);
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
    weights_[h * capacity_ + coarse] = 0.0F;
    uncertainties_[h * capacity_ + coarse] = 0.0F;
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
    const float* uncertainties = uncertainties_.data() + h * capacity_;
    for (size_t c = 0; c < coarse_; ++c) merits_[c] += uncertainties[c] * scale;
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

size_t TailEstimate::bytes() const {
  return (scores_.size() + weights_.size() + uncertainties_.size() + removed_scores_.size() +
          kept_weights_.size() + sizes_.size() + variances_.size() + removed_.size() +
          merits_.size() + read_weights_.size()) *
             sizeof(float) +
         (fine_ids_.size() + touched_.size() + ids_.size() + base_.size() + rows_.size() +
          read_ids_.size() + read_fine_.size() + read_coarse_.size()) *
             sizeof(uint32_t) +
         (ranks_.size() + spare_.size()) * sizeof(uint64_t) + row_capacity_ * sizeof(uint16_t);
}

}  // namespace keyhole::index

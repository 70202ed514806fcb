// The pass over codes in lists: the chosen ones by their codes, all others by their means.
#include <algorithm>
#include <cmath>

#include "index/scan/code_scan.h"

namespace keyhole::index {

void CodeScan::scan_lists(const CodeSearch& s, uint32_t part, std::span<const uint32_t> skipped,
                          std::span<const CodeAsker> askers) {
  const ListChoice& choice = *s.choice;
  const uint32_t parts = s.rows.parts();
  const size_t lists = s.rows.lists->lists();
  add_means(s, lists * part / parts, lists * (part + 1) / parts);
  const std::span<const uint32_t> chosen = choice.chosen();
  const size_t first = chosen.size() * part / parts, end = chosen.size() * (part + 1) / parts;
  if (s.wanted != 0) best_.begin(s.group, s.wanted, (end - first) * kCodeBlock);
  if (first == end) return;
  CodeRun run, next = s.run(chosen[first]);
  for (size_t i = first; i < end; ++i) {
    run = next;
    if (i + 1 < end) next = s.run(chosen[i + 1]);
    float offsets[kMaxGroup];
    for (uint32_t h = 0; h < s.group; ++h) {
      offsets[h] = choice.scores()[h * choice.stride() + chosen[i]];
    }
    scan_run(s, run, first_place(chosen[i]), offsets, i - first, end - first,
             i + 1 < end ? &next : nullptr, skipped, askers);
  }
}

void CodeScan::add_means(const CodeSearch& s, size_t begin, size_t end) {
  const ListChoice& choice = *s.choice;
  const CodeLists& lists = *s.rows.lists;
  const uint32_t dim = s.shape().dim;
  std::copy_n(choice.tops(), s.group, tops_);
  for (size_t c = 0; c < lists.chunks(); ++c) {
    const CodeChunk& chunk = lists.chunk(c);
    const size_t first = lists.first_list(c);
    const size_t chunk_end = std::min(end, lists.first_list(c + 1));
    for (size_t from = std::max(begin, first); from < chunk_end; from += kListsAtOnce) {
      const size_t n = std::min(kListsAtOnce, chunk_end - from);
      const float* sizes = choice.left_sizes() + from;
      const float* spreads = chunk.spreads.data() + (from - first);
      s.kernels->weigh_partitions({.scores = choice.scores() + from,
                                   .score_stride = choice.stride(),
                                   .group = s.group,
                                   .count = n,
                                   .sizes = sizes,
                                   .variances = spreads,
                                   .square_norms = norms_,
                                   .logits = s.logits,
                                   .caps = choice.tops(),
                                   .shifts = choice.tops(),
                                   .weights = list_weights_.data(),
                                   .uncertainties = nullptr,
                                   .out_stride = kListsAtOnce});
      const float widest = largest_of({spreads, n});
      for (uint32_t h = 0; h < s.group; ++h) {
        // Second order is right for lists of 2 rows up to there, and further for those of more.
        if (s.logits.scale * s.logits.scale * norms_[h] * widest > 1.38F) {
          bound_means(s, h, from, {spreads, n}, chunk.log_sizes.data() + (from - first));
        }
        float sum = 0.0F;
        for (size_t i = 0; i < n; ++i) sum += list_weights_[h * kListsAtOnce + i];
        sums_[h] += sum;
      }
      s.kernels->weighted_sum[kHalf](
          {.weights = list_weights_.data(),
           .weight_stride = kListsAtOnce,
           .group = s.group,
           .values =
               dense_rows(lists.value_means(c) + (from - first) * dim * 2, n, dim, DType::f16),
           .ids = nullptr,
           .count = n,
           .o = means_.data()});
    }
  }
}

// The mean weight of n rows whose logits vary by t is e^(t/2) more than that of their mean as long as many of them make it up. From
// t = 2 ln n on the largest alone does, which grows with the root of t.
void CodeScan::bound_means(const CodeSearch& s, uint32_t head, size_t first,
                           std::span<const float> spreads, const float* log_sizes) {
  const ListChoice& choice = *s.choice;
  const float most = s.logits.scale * s.logits.scale * norms_[head];
  for (size_t i = 0; i < spreads.size(); ++i) {
    const float size = choice.left_sizes()[first + i];
    if (size == 0.0F || most * spreads[i] <= 2.0F * log_sizes[i]) continue;
    const LogitSlope at =
        logit_slope(choice.scores()[head * choice.stride() + first + i], s.logits);
    const float t = at.slope_squared * norms_[head] * spreads[i];
    if (t <= 2.0F * log_sizes[i]) continue;
    const float logit = at.logit + std::sqrt(2.0F * t * log_sizes[i]) - log_sizes[i];
    const float top = choice.tops()[head];
    list_weights_[head * kListsAtOnce + i] = size * std::exp(std::min(logit - top, 0.0F));
  }
}

}  // namespace keyhole::index

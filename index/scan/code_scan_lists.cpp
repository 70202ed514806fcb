// The pass over codes in lists: the chosen ones by their codes, all others by their means.
#include <algorithm>

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
    const size_t first = lists.first_list(c);
    const size_t chunk_end = std::min(end, lists.first_list(c + 1));
    for (size_t from = std::max(begin, first); from < chunk_end; from += kListsAtOnce) {
      const size_t n = std::min(kListsAtOnce, chunk_end - from);
      for (uint32_t h = 0; h < s.group; ++h) {
        const float* weights = choice.weights() + h * choice.stride() + from;
        float sum = 0.0F;
        for (size_t i = 0; i < n; ++i) sum += weights[i];
        sums_[h] += sum;
      }
      s.kernels->weighted_sum[kHalf](
          {.weights = choice.weights() + from,
           .weight_stride = choice.stride(),
           .group = s.group,
           .values =
               dense_rows(lists.value_means(c) + (from - first) * dim * 2, n, dim, DType::f16),
           .ids = nullptr,
           .count = n,
           .o = means_.data()});
    }
  }
}

}  // namespace keyhole::index

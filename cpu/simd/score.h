// Kernels::score for every level: inner products of many keys with a group.
#pragma once

#include "cpu/simd/dot.h"

namespace keyhole::cpu {
namespace {

/// Rows to prefetch ahead. A core has 16 to 48 line fills in flight; 4 KiB ahead is 64 lines, enough to
/// cover the latency of memory (about 100 ns) at one row of 256 B per 10 ns.
template <DType T>
[[gnu::always_inline]] inline size_t prefetch_distance(uint32_t dim) {
  return 4096 / (dim * kElementSize<T>);
}

template <class S, DType T>
void score(const ScoreArgs& a) {
  constexpr size_t kPanel = S::kWidth;
  const Rows keys{a.keys, a.key_stride, a.ids, a.count};
  const size_t row_bytes = a.dim * kElementSize<T>;
  // Contiguous rows are left to the hardware's prefetcher.
  const size_t prefetched = a.ids != nullptr ? a.count : 0;
  const size_t ahead = prefetch_distance<T>(a.dim);
  for (size_t i = 0; i < ahead && i < prefetched; ++i) prefetch_row(keys.at(i), row_bytes);

  for (size_t begin = 0; begin < a.count; begin += kPanel) {
    for (size_t i = begin + ahead; i < begin + ahead + kPanel && i < prefetched; ++i) {
      prefetch_row(keys.at(i), row_bytes);
    }
    const std::byte* rows[kPanel];
    keys.panel(begin, rows);
    const size_t n = a.count - begin < kPanel ? a.count - begin : kPanel;
    if (n == kPanel) {
      dot_panel<S, T>(a.queries, a.group, a.dim, rows, n, a.scores + begin, a.score_stride);
      continue;
    }
    float last[kMaxGroup * kPanel];
    dot_panel<S, T>(a.queries, a.group, a.dim, rows, n, last, kPanel);
    for (uint32_t h = 0; h < a.group; ++h) {
      for (size_t k = 0; k < n; ++k) a.scores[h * a.score_stride + begin + k] = last[h * kPanel + k];
    }
  }
}

}  // namespace
}  // namespace keyhole::cpu

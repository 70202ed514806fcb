// Kernels::score for every level: inner products of many keys with a group.
#pragma once

#include "cpu/simd/dot.h"

namespace keyhole::cpu {
namespace {

template <class S, DType T>
void score(const ScoreArgs& a) {
  constexpr size_t kPanel = S::kWidth;
  const uint32_t dim = a.keys.dim;
  RowBlocks blocks(rows_of<T>(a.keys, a.ids, a.count), dim * kElementSize<T>);
  blocks.prefetch_first();
  float last[kMaxGroup * kPanel];
  for (size_t begin = 0; begin < a.count; begin += kBlock) {
    blocks.advance(begin);
    for (size_t i = begin; i < begin + kBlock && i < a.count; i += kPanel) {
      const size_t n = a.count - i < kPanel ? a.count - i : kPanel;
      Panel panel{blocks.current() + (i - begin),
                  blocks.has_next ? blocks.next() + (i - begin) : nullptr,
                  blocks.tails,
                  n,
                  dim,
                  a.scores + i,
                  a.score_stride,
                  blocks.scales() + (i - begin)};
      if (n < kPanel) {
        panel.out = last;
        panel.out_stride = kPanel;
      }
      dot_panel<S, T>(panel, a.queries, a.group);
      for (uint32_t h = 0; n < kPanel && h < a.group; ++h) {
        for (size_t k = 0; k < n; ++k) a.scores[h * a.score_stride + i + k] = last[h * kPanel + k];
      }
    }
  }
}

}  // namespace
}  // namespace keyhole::cpu

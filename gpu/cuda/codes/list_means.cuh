// Lists that a step does not read, by their mean values: their rows weigh n e^(s + t/2), bounded as index/scan/list_choice.h
// says. The warps of the pass share them, in tiles of 16 that go through the same products as tiles of 16 rows.
#pragma once

#include "gpu/cuda/codes/list_choice.cuh"

namespace keyhole::gpu::codes {

/// The log weight of an unread list's row on average, base 2, relative to the head's largest mean logit. top: that logit, base
/// 2.
__device__ inline float weight_of_list(const ListLogit& list, float log_rows, float top) {
  const float above = list.logit - top;
  // Many of a list's rows make up the weight by second order, up to a variance of twice the logarithm of their number; from
  // there on the largest row alone does.
  const float nats = list.spread <= 2.0F * log_rows
                         ? 0.5F * list.spread
                         : sqrtf(2.0F * list.spread * log_rows) - log_rows;
  return fminf(fmaf(nats, kLog2E, above), 0.0F);
}

/// What the weight of a row is as an fp16 number, 256 times as much that of a list: far from the largest and the smallest of
/// them. The unit of value codes is not, so sums are brought to it behind the products.
constexpr float kMeanWeight = 0.125F;

/// Adds tiles number, number + step, .. of a KV head's lists to a warp's sums: acc, `sum` of weights, and `top`, the
/// logarithm that these are relative to. acc is zeros before. Of lists that are read nothing is added. unit: what values are
/// multiplied by in acc.
template <int kDim, int kHeadTiles, class Sums, class Heads>
__device__ inline void add_means(const CodesParams& s, const Heads& heads, uint32_t kv_head,
                                 uint32_t number, uint32_t step,
                                 const HeadConstants (&head)[kHeadTiles], float unit,
                                 typename Sums::Products& acc, float (&top)[kHeadTiles],
                                 float (&sum)[kHeadTiles]) {
  const CodesLists& l = s.lists;
  const uint32_t lists = __ldcg(&l.counts[kv_head]);
  const uint32_t tiles = (lists + MeanTiles::kLists - 1) / MeanTiles::kLists;
  if (number >= tiles) return;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const float cap = s.logits.softcap * kLog2E;
  const size_t first = size_t{kv_head} * l.list_capacity;
  const auto* const registers =
      reinterpret_cast<const uint4*>(l.mean_tiles) + first / MeanTiles::kLists * (kDim / 16) * 32;
  const ChosenLists& ends = s.list_ends[kv_head];
#pragma unroll
  for (int t = 0; t < kHeadTiles; ++t) {
    const uint32_t h = heads.head(t) + lane % 4;
    top[t] = h < s.group ? __ldcg(&ends.tops[h]) : 0.0F;
  }
#pragma unroll 1
  for (uint32_t tile = number; tile < tiles; tile += step) {
    uint4 a[Sums::kProducts];
#pragma unroll
    for (int m = 0; m < Sums::kProducts; ++m) {
      a[m] = registers[(size_t{tile} * (kDim / 16) + m) * 32 + lane];
    }
    float2 w[kHeadTiles];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint32_t list = tile * MeanTiles::kLists + lane / 4 + 8 * r;
      const float left = list < lists ? s.list_left[first + list] : 0.0F;
      const ListFigures figures = l.figures[first + min(list, lists - 1)];
      const float* scores = s.list_scores + (first + min(list, lists - 1)) * heads.maxima();
#pragma unroll
      for (int t = 0; t < kHeadTiles; ++t) {
        const ListLogit logit =
            logit_of_list(scores[heads.head(t) + lane % 4], head[t].noise, figures.spread, cap);
        const float weight =
            left == 0.0F ? 0.0F : left * exp2_fast(weight_of_list(logit, figures.log_rows, top[t]));
        (r == 0 ? w[t].x : w[t].y) = weight * kMeanWeight;
        sum[t] += weight;
      }
    }
    float of_codes[kHeadTiles] = {};  // is of no use here: means have no part of ones
    uint32_t b[Sums::kColumns][2];
    Sums::take_weights(w, of_codes, b);
#pragma unroll
    for (int m = 0; m < Sums::kProducts; ++m) {
      const uint32_t of_tile[4] = {a[m].x, a[m].y, a[m].z, a[m].w};
#pragma unroll
      for (int c = 0; c < Sums::kColumns; ++c) {
        multiply_add<__half>(acc[c][m], of_tile, b[c][0], b[c][1]);
      }
    }
  }
#pragma unroll
  for (int t = 0; t < kHeadTiles; ++t) Sums::scale(acc, t, unit / kMeanWeight);
}

}  // namespace keyhole::gpu::codes

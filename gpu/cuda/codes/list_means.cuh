// Lists that a step does not read, by their mean values: their rows weigh n e^(s + t/2), bounded as
// index/scan/list_choice.h says, which the choice has worked out. The warps of the pass share them, in tiles of 16 that
// go through the same products as tiles of 16 rows.
#pragma once

#include "gpu/cuda/codes/params.h"
#include "gpu/cuda/common/tensor_core.cuh"

namespace keyhole::gpu::codes {

/// What the weight of a row is as an fp16 number, 256 times as much that of a list: far from the largest and the
/// smallest of them. The unit of value codes is not, so sums are brought to it behind the products.
constexpr float kMeanWeight = 0.125F;

/// A warp's share: tiles number, number + step, .. of a KV head's lists.
template <int kDim, int kHeadTiles, class Sums, class Heads>
class ListMeans {
 public:
  /// Asks for the mean values of the first tile, which are older than the choice, if they are likely to be wanted.
  __device__ ListMeans(const CodesParams& s, const Heads& heads, uint32_t kv_head, uint32_t number,
                       uint32_t step, bool are_likely)
      : s_(s), heads_(heads), kv_head_(kv_head), tile_(number), step_(step) {
    lists_ = __ldcg(&s.lists.counts[kv_head]);
    first_ = size_t{kv_head} * s.lists.list_capacity;
    has_means_ = are_likely && has_more();
    if (has_means_) load_means();
  }

  /// Asks for the weights of the first tile, once the choice has ended.
  __device__ void start() {
    const int lane = static_cast<int>(threadIdx.x % 32);
    reads_all_ = __ldcg(&s_.list_ends[kv_head_].reads_all) != 0;
#pragma unroll
    for (int t = 0; t < kHeadTiles; ++t) {
      const uint32_t h = heads_.head(t) + lane % 4;
      top_[t] = h < s_.group ? __ldcg(&s_.list_ends[kv_head_].tops[h]) : 0.0F;
    }
    if (has_more()) load_weights();
  }

  /// Whether the choice has left no list out, once it has ended.
  [[nodiscard]] __device__ bool reads_all() const { return reads_all_; }

  /// Adds the tiles to the warp's sums: acc, `sum` of weights, and `top`, the logarithm that these are relative to.
  /// unit: what weights are multiplied by.
  __device__ void add(float unit, typename Sums::Products& acc, float (&top)[kHeadTiles],
                      float (&sum)[kHeadTiles]) {
    if (reads_all_ || !has_more()) return;
    if (!has_means_) load_means();
#pragma unroll
    for (int t = 0; t < kHeadTiles; ++t) top[t] = top_[t];
    while (true) {
      float2 w[kHeadTiles];
#pragma unroll
      for (int t = 0; t < kHeadTiles; ++t) {
        w[t] = {weights_[0][t] * kMeanWeight, weights_[1][t] * kMeanWeight};
        sum[t] += weights_[0][t] + weights_[1][t];
      }
      float of_codes[kHeadTiles] = {};  // is of no use here: means have no part of ones
      uint32_t b[Sums::kColumns][2];
      Sums::take_weights(w, of_codes, b);
#pragma unroll
      for (int m = 0; m < Sums::kProducts; ++m) {
        const uint32_t of_tile[4] = {means_[m].x, means_[m].y, means_[m].z, means_[m].w};
#pragma unroll
        for (int c = 0; c < Sums::kColumns; ++c) {
          multiply_add<__half>(acc[c][m], of_tile, b[c][0], b[c][1]);
        }
      }
      tile_ += step_;
      if (!has_more()) break;
      load_means();
      load_weights();
    }
#pragma unroll
    for (int t = 0; t < kHeadTiles; ++t) Sums::scale(acc, t, unit / kMeanWeight);
  }

 private:
  [[nodiscard]] __device__ bool has_more() const { return tile_ * MeanTiles::kLists < lists_; }
  __device__ void load_means() {
    const size_t tile = first_ / MeanTiles::kLists + tile_;
    const auto* const from = reinterpret_cast<const uint4*>(s_.lists.mean_tiles) +
                             tile * (kDim / 16) * 32 + threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < Sums::kProducts; ++m) means_[m] = __ldcs(from + m * 32);
  }
  __device__ void load_weights() {
    const uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint32_t list = tile_ * MeanTiles::kLists + lane / 4 + 8 * r;
      const float* const of_list = s_.list_weights + (first_ + list) * heads_.maxima();
#pragma unroll
      for (int t = 0; t < kHeadTiles; ++t) {
        weights_[r][t] = list < lists_ ? __ldcg(of_list + heads_.head(t) + lane % 4) : 0.0F;
      }
    }
  }

  const CodesParams& s_;
  const Heads& heads_;
  uint32_t kv_head_, tile_, step_, lists_;
  size_t first_;  ///< the KV head's first list among those of all
  uint4 means_[Sums::kProducts];
  float weights_[2][kHeadTiles];  ///< of lists lane / 4 and lane / 4 + 8
  float top_[kHeadTiles];
  bool has_means_ = false;  ///< those of the first tile were asked for
  bool reads_all_ = false;  ///< no list is left out
};

}  // namespace keyhole::gpu::codes

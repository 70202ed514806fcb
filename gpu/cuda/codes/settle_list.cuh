// Lists the pairs of tiles of a KV head in doubt that may have a row to be found, by the maxima of every 32 rows that
// the pass has left, so that a second look passes over all others. In heads in doubt a few pairs of a hundred have
// one.
#pragma once

#include "gpu/cuda/codes/settle_find.cuh"

namespace keyhole::gpu::codes {

constexpr uint32_t kMostPairs = 1024;  ///< that a thread block lists

/// The pairs of one thread block: blocks of codes are dealt out to `blocks` thread blocks in turn, and to warps in
/// runs.
class PairList {
 public:
  /// part: number of the part of the group; rank: number of this thread block.
  __device__ PairList(const CodesParams& s, const DoubtUnit& unit, uint32_t rank, uint32_t blocks)
      : rank_(rank), blocks_(blocks), words_(unit.found(s)) {
    const uint32_t heads = s.padded_heads;  // that have maxima
    maxima_ = reinterpret_cast<const float4*>(
        s.maxima + size_t{unit.kv_head} * s.block_capacity * kBlockMaxima * heads +
        kDoubtHeads * unit.part);
    stride_ = heads / 4;
    const DoubtRecord& record = s.doubt.records[unit.kv_head];
    float least[kDoubtHeads];
#pragma unroll
    for (uint32_t i = 0; i < kDoubtHeads; ++i) {
      const uint32_t h = kDoubtHeads * unit.part + i;
      least[i] = h < s.group ? least_weight(s, __ldcg(&record.lse[h]), __ldcg(&record.far[h]))
                             : NAN;  // a bound that nothing reaches
    }
    least_ = {least[0], least[1], least[2], least[3]};
    const uint32_t all = __ldcv(s.block_count);
    count_ = all > rank ? (all - rank + blocks - 1) / blocks : 0;
  }

  /// Counts the pairs, by the whole thread block, between barriers. counts: gets those of each warp.
  template <uint32_t kWarps>
  __device__ uint32_t count(uint32_t (&counts)[kWarps]) const {
    const uint32_t warp = threadIdx.x / 32;
    uint32_t own = 0;
    for_each<kWarps>(
        [&](uint32_t, bool may_weigh) { own += __popc(__ballot_sync(kWholeWarp, may_weigh)); });
    if (threadIdx.x % 32 == 0) counts[warp] = own;
    __syncthreads();
    uint32_t sum = 0;
    for (uint32_t w = 0; w < kWarps; ++w) sum += counts[w];
    return sum;
  }
  /// Lists the pairs, those of a block of codes side by side, after count(). Marks no row of the others as found.
  template <uint32_t kWarps>
  __device__ void list(const uint32_t (&counts)[kWarps], uint32_t* to) const {
    uint32_t at = 0;
    for (uint32_t w = 0; w < threadIdx.x / 32; ++w) at += counts[w];
    for_each<kWarps>([&](uint32_t pair, bool may_weigh) {
      const uint32_t all = __ballot_sync(kWholeWarp, may_weigh);
      const uint32_t before = (1U << threadIdx.x % 32) - 1;
      if (may_weigh) to[at + __popc(all & before)] = pair;
      if (pair != ~0U) words_[pair] = 0;
      at += __popc(all);
    });
    __syncthreads();
  }

 private:
  /// Calls visit(pair, whether it may have a row to be found) for all pairs of the warp, 32 at once; ~0 for none.
  template <uint32_t kWarps, class Visit>
  __device__ void for_each(const Visit& visit) const {
    constexpr uint32_t kBlocks = 32 / kBlockMaxima;  // at once
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t each = (count_ + kWarps - 1) / kWarps;
    const uint32_t end = min((warp + 1) * each, count_);
    for (uint32_t i = warp * each; i < end; i += kBlocks) {
      const uint32_t own = i + lane / kBlockMaxima;
      uint32_t pair = ~0U;
      bool may_weigh = false;
      if (own < end) {
        pair = (rank_ + own * blocks_) * kBlockMaxima + lane % kBlockMaxima;
        const float4 x = __ldcg(&maxima_[size_t{pair} * stride_]);
        may_weigh = x.x >= least_.x || x.y >= least_.y || x.z >= least_.z || x.w >= least_.w;
      }
      visit(pair, may_weigh);
    }
  }

  uint32_t rank_, blocks_;
  uint32_t* words_;
  const float4* maxima_;
  uint32_t stride_;  ///< of maxima_, from pair to pair
  float4 least_;
  uint32_t count_;  ///< blocks of codes that this thread block has
};

}  // namespace keyhole::gpu::codes

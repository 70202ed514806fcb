// More lists for heads that look at everything, by the rule of index/scan/list_choice.h (ListShare::miss): a head whose
// unread lists weigh more than miss |o| / dim^(1/2), and more than a sixty-fourth of all, has its own lists read from
// that of most hope on until they do not. The parts of it in the order in which the choice calls them:
//
//   add_values()  o, the sum of weights and mean values over all lists, from kSampled components alone: components are
//                 rotated, and so alike, and |o| of 32 of them is off by an eighth (standard deviation). On tensor
//                 cores, while the bins of all blocks are waited for
//   add_left()    what lists that the share does not read weigh, and of each head how much of it by hope, in bins of
//                 1/32 nat
//   read_more()   behind a barrier of all blocks: which heads lack, and which lists they want. Where none lacks, that
//                 is all
//
// Their codes are not brought on the way to the L2 cache as those of the share: they may be more than it holds.
//
// The numbers of a bin are integers in units of the block's own sum, so that sums do not depend on the order of
// threads.
#pragma once

#include "gpu/cuda/codes/own_lists.cuh"
#include "gpu/cuda/codes/value_sums.cuh"

namespace keyhole::gpu::codes {

/// What a block tells the others.
template <int kHeadTiles, uint32_t kBlocks>
struct MoreTold {
  static constexpr uint32_t kHeads = 4 * kHeadTiles;
  static constexpr uint32_t kSampled = 32;  ///< components

  // Of the block's lists: sums of weights times mean values, of weights, of those of lists that the share does not
  // read, and what a unit of the bins is.
  float values[kHeads][kSampled];
  float all[kHeads], left[kHeads], unit[kHeads];
  alignas(16) uint32_t bins[kHeads][kListBins];
  // Written by other blocks.
  uint32_t wanted[kHeads];  ///< so many first bins of a head are read
  alignas(16) uint32_t more_pairs[kBlocks];
};

/// Shared memory of a thread block, where ListShare::miss is not 0.
template <int kHeadTiles, class Blocks>
struct MoreShared {
  using Told = MoreTold<kHeadTiles, Blocks::kBlocks>;
  static constexpr uint32_t kHeads = Told::kHeads, kSampled = Told::kSampled;

  float warp_values[kListWarps][kHeads][kSampled];
  float warp_all[kListWarps][kHeads], warp_left[kListWarps][kHeads];
  alignas(16) std::conditional_t<Blocks::kTellByMemory, ToldByMemory, Told> told;
  float most_left[kHeads];  ///< what a head that lacks may leave; below 0: it does not lack
};

template <int kDim, int kHeadTiles, class Blocks>
class MoreLists {
 public:
  static constexpr uint32_t kBlocks = Blocks::kBlocks;
  using Own = OwnLists<kDim, kHeadTiles, Blocks>;
  using Shared = MoreShared<kHeadTiles, Blocks>;

  __device__ MoreLists(const Own& own, unsigned char* memory)
      : own_(own), shared_(*reinterpret_cast<Shared*>(memory)) {}

  [[nodiscard]] static __device__ bool is_asked(const CodesParams& s) {
    return s.lists.share.miss > 0.0F;
  }

  /// Brings mean values on their way to the L2 cache, and clears the bins; a barrier comes before add_left().
  __device__ void start() const {
    const uint32_t tile = threadIdx.x;
    if (tile * kListTile < own_.count) prefetch_bulk(tile_of(tile), kTaken * 32 * sizeof(uint4));
    for (uint32_t i = threadIdx.x; i < kHeads * kListBins; i += kListThreads) {
      told().bins[0][i] = 0;
    }
  }

  /// After the weights of all lists are noted; a barrier comes between this and add_left().
  __device__ void add_values() const {
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float sums[kColumns][kTaken][4] = {}, all[kColumns] = {};
    uint4 means[kTaken], next[kTaken];
    const auto load = [&](uint32_t tile) {
#pragma unroll
      for (int m = 0; m < kTaken; ++m) next[m] = __ldg(tile_of(tile) + m * 32 + lane);
    };
    if (warp * kListTile < own_.count) load(warp);
    __syncthreads();
#pragma unroll 1
    for (uint32_t tile = warp; tile * kListTile < own_.count; tile += kListWarps) {
#pragma unroll
      for (int m = 0; m < kTaken; ++m) means[m] = next[m];
      if ((tile + kListWarps) * kListTile < own_.count) load(tile + kListWarps);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const uint32_t h = 8 * c + lane / 4;
        float w[4];
#pragma unroll
        for (uint32_t k = 0; k < 4; ++k) {
          const uint32_t i = tile * kListTile + lane % 4 * 2 + k % 2 + k / 2 * 8;
          w[k] = h < kHeads && i < own_.count ? own_.noted_weight(i, h) : 0.0F;
        }
        all[c] += w[0] + w[1] + (w[2] + w[3]);
        const uint32_t b[2] = {packed(__float2half_rn(w[0]), __float2half_rn(w[1])),
                               packed(__float2half_rn(w[2]), __float2half_rn(w[3]))};
        __syncwarp();
#pragma unroll
        for (int m = 0; m < kTaken; ++m) {
          const uint32_t a[4] = {means[m].x, means[m].y, means[m].z, means[m].w};
          multiply_add<__half>(sums[c][m], a, b[0], b[1]);
        }
      }
    }
    const bool is_narrow = own_.s.shape.value_bits == 2;  // see MeanTiles
    const float odd = is_narrow ? ValueUnits<2>::kOdd / ValueUnits<2>::kEven : 1.0F;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
#pragma unroll
      for (uint32_t step = 1; step < 4; step *= 2) {
        all[c] += __shfl_xor_sync(kWholeWarp, all[c], step);
      }
      if (lane % 4 == 0 && 8 * c + lane / 4 < kHeads) {
        shared_.warp_all[warp][8 * c + lane / 4] = all[c];
      }
#pragma unroll
      for (uint32_t j = 0; j < 2; ++j) {
        const uint32_t h = 8 * c + lane % 4 * 2 + j;
        if (h >= kHeads) continue;
#pragma unroll
        for (int m = 0; m < kTaken; ++m) {
          float* const to = shared_.warp_values[warp][h] + 16 * m + lane / 4;
          to[0] = sums[c][m][j];
          to[8] = sums[c][m][2 + j] * odd;
        }
      }
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < kHeads * Shared::kSampled; i += kListThreads) {
      float sum = 0.0F;
#pragma unroll
      for (uint32_t w = 0; w < kListWarps; ++w) sum += shared_.warp_values[w][0][i];
      told().values[0][i] = sum;
    }
    if (threadIdx.x < kHeads) {
      float sum = 0.0F;
#pragma unroll
      for (uint32_t w = 0; w < kListWarps; ++w) sum += shared_.warp_all[w][threadIdx.x];
      told().all[threadIdx.x] = sum;
    }
  }

  /// last: the last bin that the share reads. A barrier of all blocks comes between this and read_more().
  __device__ void add_left(uint32_t last) const {
    constexpr float kUnits = 1U << 30U;
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const float all = own_.blocks.read(&told().all[own_.head]);
    const float units = all > 0.0F ? kUnits / all : 0.0F;
    float left = 0.0F;
    own_.for_each([&](uint32_t i, bool is_one) {
      if (!is_one || own_.bin_of(i) <= last) return;
      const float weight = own_.noted_weight(i, own_.head);
      left += weight;
      if (weight * units > 0.5F) {
        atomicAdd(&told().bins[own_.head][bin_of(own_.list_of(i))],
                  __float2uint_rn(fminf(weight * units, kUnits)));
      }
    });
    left = Own::sum_of_head(left);
    if (lane < kHeads) shared_.warp_left[warp][lane] = left;
    __syncthreads();
    if (threadIdx.x >= kHeads) return;
    left = 0.0F;
#pragma unroll
    for (uint32_t w = 0; w < kListWarps; ++w) left += shared_.warp_left[w][threadIdx.x];
    told().left[threadIdx.x] = left;
    told().unit[threadIdx.x] = all / kUnits;
  }

  /// Gives the lists that are read beside those of the share the bin kMoreBin. Returns their pairs of tiles, of all
  /// blocks; `before`: gets those of the blocks before this one. A barrier of all blocks comes behind it before the
  /// block ends.
  __device__ uint32_t read_more(uint32_t last, uint32_t& before) const {
    before = 0;
    ask_heads();
    __syncthreads();
    const bool lacks = own_.head < own_.s.group && shared_.most_left[own_.head] >= 0.0F;
    // All blocks go on or none: they have the same sums.
    if (__syncthreads_or(lacks ? 1 : 0) == 0) return 0;
    find_bins();
    own_.blocks.barrier();
    const uint32_t wanted = own_.blocks.read(&told().wanted[own_.head]);
    uint32_t own = 0;
    own_.for_each([&](uint32_t i, bool is_one) {
      const bool is_wanted = bin_of(own_.list_of(i)) < wanted;
      const bool is_read = Own::largest_of_list(is_wanted ? 1.0F : 0.0F) != 0.0F;
      if (!is_one || !is_read || own_.head != 0 || own_.bin_of(i) <= last) return;
      const ListPlace place = own_.place_of(i);
      own += Own::pairs_of_list(place);
      own_.note_bin(i, kMoreBin);
    });
    uint32_t of_block = 0;
    (void)sum_before(own, own_.shared, of_block);
    if (threadIdx.x < kBlocks) {
      *own_.blocks.in_block(&told().more_pairs[own_.rank], threadIdx.x) = of_block;
    }
    own_.blocks.barrier();
    uint32_t of_all = 0;
#pragma unroll
    for (uint32_t b = 0; b < kBlocks; ++b) {
      const uint32_t pairs = own_.blocks.read(&told().more_pairs[b]);
      if (b < own_.rank) before += pairs;
      of_all += pairs;
    }
    return of_all;
  }

 private:
  [[nodiscard]] __device__ typename Shared::Told& told() const {
    if constexpr (Blocks::kTellByMemory) {
      return *reinterpret_cast<typename Shared::Told*>(own_.told_memory() +
                                                       kMoreToldAt<kHeadTiles, Blocks>);
    } else {
      return shared_.told;
    }
  }
  /// What block `rank` tells at the place where this one has `mine`.
  template <class T>
  [[nodiscard]] __device__ T told_by(uint32_t rank, const T* mine) const {
    return own_.blocks.read(own_.blocks.in_block(mine, rank));
  }

  static constexpr uint32_t kHeads = Own::kHeads;
  static constexpr int kColumns = (kHeads + 7) / 8;     ///< of 8 heads
  static constexpr int kTaken = Shared::kSampled / 16;  ///< products of a tile

  /// The mean values of the block's tile `tile`, see MeanTiles.
  [[nodiscard]] __device__ const uint4* tile_of(uint32_t tile) const {
    return reinterpret_cast<const uint4*>(own_.s.lists.mean_tiles) +
           (own_.first / MeanTiles::kLists + tile) * (kDim / 16) * 32;
  }
  /// A list's bin by its hope for the thread's head.
  [[nodiscard]] __device__ uint32_t bin_of(const typename Own::List& list) const {
    const float below = own_.shared.ends[Own::Ends::kTop + own_.head] - Own::hope_of(list);
    const float step = below * kWeightBinsPerNat;
    return step < kListBins - 1.0F ? static_cast<uint32_t>(fmaxf(step, 0.0F)) : kListBins - 1;
  }
  /// Which heads lack, a warp each. All blocks add in the same order.
  __device__ void ask_heads() const {
    const uint32_t lane = threadIdx.x % 32;
#pragma unroll 1
    for (uint32_t h = threadIdx.x / 32; h < own_.s.group; h += kListWarps) {
      float o = 0.0F;
#pragma unroll
      for (uint32_t b = 0; b < kBlocks; ++b) o += told_by(b, &told().values[h][lane]);
      const bool is_block = lane < kBlocks;
      const float all = warp_sum(is_block ? told_by(lane, &told().all[h]) : 0.0F);
      const float left = warp_sum(is_block ? told_by(lane, &told().left[h]) : 0.0F);
      const float size = sqrtf(warp_sum(o * o) / Shared::kSampled);
      const float most = fmaxf(own_.s.lists.share.miss * size, kLittleWeight * all);
      if (lane == 0) shared_.most_left[h] = left > most ? most : -1.0F;
    }
  }
  /// Tells all blocks of each head that lacks the bins from which the rest is within its limit. Blocks divide the
  /// heads, whose bins in all blocks are much to read, and a warp has one: a lane has 16 bins.
  __device__ void find_bins() const {
    constexpr int kOfLane = kListBins / 32;
    const uint32_t lane = threadIdx.x % 32;
    const auto tell = [&](uint32_t h, uint32_t wanted) {
      if (lane < kBlocks) *own_.blocks.in_block(&told().wanted[h], lane) = wanted;
    };
#pragma unroll 1
    for (uint32_t h = own_.rank + threadIdx.x / 32 * kBlocks; h < kHeads;
         h += kListWarps * kBlocks) {
      const float most = h < own_.s.group ? shared_.most_left[h] : -1.0F;
      if (most < 0.0F) {
        tell(h, 0);
        continue;
      }
      float weights[kOfLane] = {};
#pragma unroll 4
      for (uint32_t b = 0; b < kBlocks; ++b) {
        const float unit = told_by(b, &told().unit[h]);
#pragma unroll
        for (int k = 0; k < kOfLane; k += 4) {
          const uint4 four =
              told_by(b, reinterpret_cast<const uint4*>(&told().bins[h][lane * kOfLane + k]));
          weights[k] = fmaf(static_cast<float>(four.x), unit, weights[k]);
          weights[k + 1] = fmaf(static_cast<float>(four.y), unit, weights[k + 1]);
          weights[k + 2] = fmaf(static_cast<float>(four.z), unit, weights[k + 2]);
          weights[k + 3] = fmaf(static_cast<float>(four.w), unit, weights[k + 3]);
        }
      }
      float own = 0.0F;
#pragma unroll
      for (int k = 0; k < kOfLane; ++k) own += weights[k];
      float behind = own;  // of this lane's bins and all later ones
#pragma unroll
      for (uint32_t step = 1; step < 32; step *= 2) {
        const float other = __shfl_down_sync(kWholeWarp, behind, step);
        if (lane + step < 32) behind += other;
      }
      behind -= own;
      // The last bin with more than the limit in it and behind it; the first where rounding leaves none.
      uint32_t found = 0;
#pragma unroll
      for (int k = kOfLane - 1; k >= 0; --k) {
        behind += weights[k];
        if (behind > most) found = max(found, lane * kOfLane + k);
      }
      found = __reduce_max_sync(kWholeWarp, found);
      tell(h, found + 1);
    }
  }

  const Own& own_;
  Shared& shared_;
};

}  // namespace keyhole::gpu::codes

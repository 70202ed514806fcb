// The pass over all codes of a layer. Each warp has a run of pairs of tiles, 32 rows a pair; all warps have the same
// number of pairs, give or take one, whatever the number of blocks:
//
//   logits   gpu/cuda/codes/tile_logits.cuh
//   weights  2^(logit - m), m a running maximum that moves only where a logit passes it by 2^6, so that a tile costs
//            no reduction; weight times value factor in fp16, for up to 4 heads with its rounding error
//            (value_sums.cuh)
//   values   the codes as they lie, which are subnormal fp16 numbers (one shift and mask for two codes, one mask alone
//            where they lie right), m16n8k16; behind every block what all rows have in common is subtracted
//
// ROUNDING. Tensor cores cut sums off, always towards zero. What they cut off a sum that only grows adds up to a
// share of it that grows with the number of tiles, and values that cancel are a small part of such a sum. So the sums
// are centred behind every block: what they hold is what values leave of each other, in which errors cancel, too.
//
// LAUNCHED AHEAD of the end of the kernel before it, a block asks for its first pairs at once. That is safe: an
// encoding of codes is always followed by a kernel that waits for it and writes the number of codes
// (Codes::encode()), so no codes are still being written when this kernel starts. Their number may be: it is read
// again when all before has ended, with the queries and the resident tokens.
//
// LATENCY. A tile is a chain of products, exponentials, products; a multiprocessor has 16 warps, and each issues in
// order. So both tiles of a pair and all heads go through the chain side by side, with one branch (whether a maximum
// moves) for all of them: with a branch for each tile and 4 heads, every one would wait for the one before.
//
// FLOOR. 70.5 bytes a row at 2/2 and d = 128: 74 MB for 128k tokens of 8 KV heads, 18 us at 4 TB/s.
#pragma once

#include <type_traits>

#include "gpu/cuda/codes/attend_shared.cuh"
#include "gpu/cuda/codes/grid_split.cuh"
#include "gpu/cuda/codes/list_means.cuh"
#include "gpu/cuda/codes/list_memory.cuh"
#include "gpu/cuda/codes/listed_entries.cuh"
#include "gpu/cuda/codes/pair_places.cuh"
#include "gpu/cuda/codes/queries.cuh"
#include "gpu/cuda/codes/resident_rows.cuh"
#include "gpu/cuda/codes/tile_logits.cuh"
#include "gpu/cuda/codes/tile_ring.cuh"
#include "gpu/cuda/codes/value_sums.cuh"
#include "gpu/cuda/common/grid_dependency.cuh"

namespace keyhole::gpu::codes {

/// Whether the heads of a group may be divided among several thread blocks, by blockIdx.z: there are no registers for
/// 16 heads of that dimension.
template <int kDim>
constexpr bool kDividesGroup = kDim > 128;

/// The same of a step with lists: 8 heads of 128 components, too, for which 99 KiB of shared memory are enough where
/// they are too little for 16 with 4 bits.
template <int kDim, int kHeadTiles>
constexpr bool kDividesListed = kDividesGroup<kDim> || (kDim == 128 && kHeadTiles == 2);

/// Pairs behind those in its ring that a warp asks the L2 cache for while it prepares queries.
inline constexpr uint32_t kPairsAhead = 2;

/// In place of ListMeans where there are no lists.
struct NoMeans {
  template <class... Arguments>
  __device__ explicit NoMeans(const Arguments&... /*unused*/) {}
};

/// Attends the split of this thread block. heads: those of steps over the same codes, with the same stages and
/// logits.
template <int kDim, int kBits, int kHeadTiles, class Heads, class Split>
__device__ __forceinline__ void attend(const Heads& heads, const Split& split) {
  constexpr CodeShape kShape{kDim, kBits, kBits};
  constexpr int kSteps = static_cast<int>(kShape.key_steps()) / 2;
  constexpr int kHeads = 4 * kHeadTiles;
  constexpr int kWarps = kAttendWarps<kDim>;
  using Sums = ValueSums<kDim, kHeadTiles>;
  constexpr int kProducts = Sums::kProducts;
  using Units = ValueUnits<kBits>;

  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = attend_shared<kDim, kBits, kHeadTiles>(memory);
  auto& queries = shared.queries;
  auto& resident = shared.resident;
  auto& shared_max = shared.max;
  auto& shared_sum = shared.sum;

  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const uint32_t kv_head = split.kv_head();
  const CodesParams& s = heads.step(0);
  const bool has_resident = Heads::kHasResident && s.has_resident;
  const std::byte* const base = s.blocks + kv_head * s.head_stride;
  using Ring = TileRing<kDim, kBits, Split::kOnce>;
  Ring ring(reinterpret_cast<std::byte*>(memory) +
                size_t{Ring::Pair::kBytes} * static_cast<uint32_t>(warp * s.stages),
            s.stages, base, s.block_stride);
  uint32_t end_block = 0, first = 0, end = 0, ahead = 0;
  // pair_of(i): the number of the i-th pair in the order in which pairs are attended.
  const auto pair_of = [&](uint32_t i) {
    if constexpr (Split::kFinds)
      return split.pair(i);
    else
      return i;
  };
  ListedEntries<kDim, kBits> entries(s, kv_head);  // of no use without lists
  bool reads_all = false;                          // with lists: it takes in all blocks
  const auto take_in = [&] {
    if constexpr (Split::kLists) {
      const ListedPair next = entries.of(ahead);
      if (ahead >= end || is_of_block(next)) {
        ring.take_in(ahead < end, next.pair);
      } else {
        ring.take_in_whole(s.lists.pairs + (size_t{kv_head} * s.lists.pair_capacity + next.pair) *
                                               Ring::Pair::kBytes);
      }
    } else {
      ring.take_in(ahead < end, ahead < end ? pair_of(ahead) : 0);
    }
    ++ahead;
  };
  const auto start = [&] {
    uint32_t begin = 0, pairs = 0;
    if constexpr (Split::kLists) {
      pairs = reads_all ? end_block * kBlockMaxima : pairs_of(s, kv_head);
    } else {
      begin = split.first_block() * kBlockMaxima;
      pairs = end_block * kBlockMaxima - begin;
    }
    if constexpr (Split::kFinds) pairs = split.pairs(end_block);
    const uint32_t warps = split.count() * kWarps;
    const uint32_t number = split.number() * kWarps + warp;
    const uint32_t each = pairs / warps, more = pairs - each * warps;
    first = begin + number * each + min(number, more);
    end = first + each + (number < more ? 1 : 0);
    ahead = first;
    if constexpr (Split::kLists) entries.start(first, end, s.stages - 1, reads_all);
    if constexpr (kLooksAlone<kDim>) {
      take_in();
    } else {
#pragma unroll 1
      for (int i = 1; i < s.stages; ++i) take_in();
    }
    if (!Split::kLists && first < end) {
      prefetch_means<kShape.key_mean_at(), kShape.noise_at() + 4>(
          base + pair_of(first) / kBlockMaxima * s.block_stride, lane);
    }
  };
  if constexpr (!Split::kLists) {
    end_block = split.end_block(s);
    start();
  } else if (may_read_all(s)) {
    reads_all = true;
    end_block = __ldcv(s.block_count);
    start();
  }
  const float value_scale = value_scale_of(s, kv_head);
  // A choice among lists has waited for all before it: queries and resident tokens are older than this kernel. One that
  // may read all blocks may not have waited yet.
  if (!Split::kLists || reads_all) {
    wait_for_kernels_before();
    let_next_kernel_start();
  }
  RawQueries<kDim, kHeads, kWarps> raw_queries;
  raw_queries.load(heads, kv_head);
  if constexpr (!Split::kLists) {
    if (const uint32_t now = split.end_block(s); now != end_block) {
      end_block = now;
      ring.restart();
      start();
    }
  }
  if constexpr (Heads::kHasResident) {
    if (has_resident) {
      typename Split::template Resident<kDim, kHeadTiles> share(s, kv_head, heads.head(0), split,
                                                                resident);
      // The share's rows are on their way. Until they are attended memory would have nothing to do, as what the ring
      // has room for is there long before.
      if constexpr (!Split::kFinds && !Split::kLists) {
#pragma unroll 1
        for (uint32_t i = 0; i < kPairsAhead; ++i) {
          if (ahead + i < end) ring.prefetch(ahead + i);
        }
      }
      queries.prepare(heads, raw_queries, resident.rows);
      share.attend(value_scale);
    }
  }
  if (!has_resident) {
    queries.prepare(heads, raw_queries, resident.rows);
    __syncthreads();
  }
  // The last warps, which have fewer pairs, come first.
  using Means =
      std::conditional_t<Split::kLists, ListMeans<kDim, kHeadTiles, Sums, Heads>, NoMeans>;
  const uint32_t all_warps = split.count() * kWarps;
  Means means(s, heads, kv_head, all_warps - 1 - (split.number() * kWarps + warp), all_warps,
              !reads_all);
  if constexpr (Split::kLists) {
    wait_for_kernels_before();
    let_next_kernel_start();
    means.start();
    const uint32_t now = __ldcv(s.block_count);
    if (!reads_all || !means.reads_all() || now != end_block) {
      if (reads_all) ring.restart();
      reads_all = means.reads_all();
      end_block = now;
      start();
    }
  }
  // The lane works out the weight of head lane % 4 of tile lane / 4.
  const int own_tile = min(lane / 4, kHeadTiles - 1);
  const bool has_maxima = lane < kHeads && heads.has(static_cast<uint32_t>(lane)) &&
                          heads.step(own_tile).exact_rows != 0;
  float* const maxima = heads.step(own_tile).maxima +
                        size_t{kv_head} * most_groups(heads.step(own_tile)) * heads.maxima() +
                        heads.head(own_tile) + lane % 4;

  uint32_t q[kHeadTiles][kSteps][2];
  HeadConstants head[kHeadTiles];
  load_products<kDim, kBits, kHeadTiles>(queries, lane, q, head);
  auto finder = [&] {
    if constexpr (Split::kFinds)
      return split.finder(head[0]);
    else
      return 0;
  }();
  // A row that is left out has a logit of -inf, and so may a whole tile.
  const auto base_of = [](float top) { return Split::kFinds ? finite_base(top) : top; };

  const float cap = s.logits.softcap * kLog2E;
  float acc[Sums::kColumns][kProducts][4] = {};
  float top[kHeadTiles], sum[kHeadTiles], scaled_sum[kHeadTiles];  // scaled_sum: of a block
#pragma unroll
  for (int t = 0; t < kHeadTiles; ++t) {
    top[t] = kMinusInf;
    sum[t] = scaled_sum[t] = 0.0F;
  }
  // The first pairs of codes are on their way meanwhile.
  if constexpr (Split::kLists) means.add(0.5F / Units::kEven, acc, top, sum);

  for (uint32_t at = first; at < end;) {
    float middle[kHeadTiles], block_sum[kHeadTiles];
    const __half* value_mean;
    float noise;
    uint32_t block_end;
    if constexpr (Split::kLists) {
      // The pairs of a list, or of a block, lie side by side in the table.
      entries.move_to(at);
      const ListedPair entry = entries.of(at);
      const PairPlace<kDim, kBits> place(s, kv_head, entry, heads.maxima());
      for (block_end = at + 1; block_end < end && is_same_owner(entries.of(block_end), entry);) {
        ++block_end;
      }
      value_mean = place.value_mean;
      noise = place.noise;
#pragma unroll
      for (int t = 0; t < kHeadTiles; ++t) {
        middle[t] = place.scores != nullptr
                        ? place.scores[heads.head(t) + lane % 4]
                        : mean_logit<kDim>(&queries.rows[4 * t], place.key_mean, lane);
      }
    } else {
      const uint32_t b = pair_of(at) / kBlockMaxima;
      const std::byte* block = base + b * s.block_stride;
      const auto* key_mean = reinterpret_cast<const __half*>(block + kShape.key_mean_at());
      value_mean = reinterpret_cast<const __half*>(block + kShape.value_mean_at());
      noise = *reinterpret_cast<const float*>(block + kShape.noise_at());
#pragma unroll
      for (int t = 0; t < kHeadTiles; ++t) {
        middle[t] = mean_logit<kDim>(&queries.rows[4 * t], key_mean, lane);
      }
      block_end = min(end, (b + 1) * kBlockMaxima);
      if constexpr (Split::kFinds) {
        for (block_end = at + 1; block_end < end && pair_of(block_end) / kBlockMaxima == b;) {
          ++block_end;
        }
      }
      if (block_end < end) {
        const std::byte* next = block + s.block_stride;
        if constexpr (Split::kFinds) {
          next = base + pair_of(block_end) / kBlockMaxima * s.block_stride;
        }
        prefetch_means<kShape.key_mean_at(), kShape.noise_at() + 4>(next, lane);
      }
    }
#pragma unroll
    for (float& x : block_sum) x = 0.0F;
    for (; at < block_end; ++at) {
      const std::byte* const pair = ring.wait();
      if constexpr (!kLooksAlone<kDim>) take_in();
      if constexpr (Split::kLists) entries.prefetch(at + ListedEntries<kDim, kBits>::kAhead, false);
      CodeTile<kDim, kBits> tiles[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) Ring::read(pair, i, lane, tiles[i]);
      if constexpr (kLooksAlone<kDim>) {
        __syncwarp();  // all lanes have read the pair, whose place is the next one's
        take_in();
      }
      float2 logits[2][kHeadTiles];
      if constexpr (Split::kFinds) {
        static_assert(kHeadTiles == 1);
        int scores[2][1][4] = {};
        tile_scores<kDim, kBits, 1>(tiles, q, scores);
        weigh_scores<1>(tiles, scores, head, noise, cap, middle, logits);
        finder.find(pair_of(at), tiles, scores, head[0], noise, middle[0], logits);
      } else {
        tile_logits<kDim, kBits, kHeadTiles>(tiles, q, head, noise, cap, middle, logits);
      }
      if constexpr (Split::kLists) {
        // The last pair of a list has places without rows.
        if (const uint32_t rows = rows_of(entries.of(at)); rows < kPairRows) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const uint32_t row = 16 * i + lane / 4;
#pragma unroll
            for (int t = 0; t < kHeadTiles; ++t) {
              if (row >= rows) logits[i][t].x = kMinusInf;
              if (row + 8 >= rows) logits[i][t].y = kMinusInf;
            }
          }
        }
      }
      // One vote serves both tiles and all heads, because no instruction is moved across it.
      float largest[kHeadTiles];
      bool moves = false;
#pragma unroll
      for (int t = 0; t < kHeadTiles; ++t) {
        largest[t] =
            fmaxf(fmaxf(logits[0][t].x, logits[0][t].y), fmaxf(logits[1][t].x, logits[1][t].y));
        moves = moves || largest[t] > top[t] + kHeadroom;
      }
      if (__any_sync(kWholeWarp, moves)) {
#pragma unroll
        for (int t = 0; t < kHeadTiles; ++t) {
          const float moved = fmaxf(top[t], max_of_head(largest[t]));
          const float keep = exp2_fast(top[t] - base_of(moved));
          top[t] = moved;
          sum[t] *= keep;
          block_sum[t] *= keep;
          scaled_sum[t] *= keep;
          Sums::scale(acc, t, keep);
        }
      }
      uint32_t weights[2][Sums::kColumns][2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float g0 = __high2float(tiles[i].factors[0]), g1 = __high2float(tiles[i].factors[1]);
        float2 w[kHeadTiles];
#pragma unroll
        for (int t = 0; t < kHeadTiles; ++t) {
          const float p0 = exp2_fast(logits[i][t].x - base_of(top[t]));
          const float p1 = exp2_fast(logits[i][t].y - base_of(top[t]));
          block_sum[t] += p0 + p1;
          w[t] = {p0 * g0, p1 * g1};
        }
        Sums::take_weights(w, scaled_sum, weights[i]);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int m = 0; m < kProducts; ++m) {
          uint32_t a[4];
#pragma unroll
          for (int r = 0; r < 4; ++r) {
            a[r] = value_register<kBits>(tiles[i].values, 4 * m + r);
          }
#pragma unroll
          for (int c = 0; c < Sums::kColumns; ++c) {
            multiply_add<__half>(acc[c][m], a, weights[i][c][0], weights[i][c][1]);
          }
        }
      }
      if constexpr (!Split::kFinds) {
        float best = max_of_head(largest[0]);
#pragma unroll
        for (int t = 1; t < kHeadTiles; ++t) {
          const float of_tile = max_of_head(largest[t]);
          best = lane / 4 == t ? of_tile : best;
        }
        if (has_maxima) maxima[size_t{at} * heads.maxima()] = best;
      }
    }
    // The mean value of the block counts with all that the block's rows weigh.
#pragma unroll
    for (int t = 0; t < kHeadTiles; ++t) {
      sum[t] += block_sum[t];
      const float all = 0.5F * sum_of_head(block_sum[t]);
      // The middle of the codes, where values are 0, is taken away as often as all of that times factors.
      constexpr float kMiddle = 0.5F * static_cast<float>((1 << kBits) - 1);
      const float middles = -kMiddle * sum_of_head(scaled_sum[t]);
      scaled_sum[t] = 0.0F;
#pragma unroll
      for (int m = 0; m < kProducts; ++m) {
        const int j = 16 * m + lane / 4;
        Sums::add(acc, t, m, fmaf(all, __half2float(value_mean[j]), middles) / Units::kEven,
                  fmaf(all, __half2float(value_mean[j + 8]), middles) / Units::kOdd);
      }
    }
  }

  float sign = 1.0F;
  if constexpr (Split::kFinds) {
    finder.count();
    sign = split.sign();
  }

  // The states of the warps are summed in a fixed order, four heads at a time.
  auto& states = *reinterpret_cast<WarpStates<kDim>*>(memory);
  __syncthreads();  // no warp reads its ring any more
#pragma unroll
  for (int t = 0; t < kHeadTiles; ++t) {
    sum[t] = sum_of_head(sum[t]);
    if (lane < 4) {
      shared_max[warp][4 * t + lane] = top[t];
      shared_sum[warp][4 * t + lane] = sum[t];
    }
  }
#pragma unroll
  for (int t = 0; t < kHeadTiles; ++t) {
    const CodesParams& own = heads.step(t);
    const size_t part = (size_t{kv_head} * own.splits + split.place()) * own.group + heads.head(t);
    float* row = states.o[warp][lane % 4];
#pragma unroll
    for (int m = 0; m < kProducts; ++m) {
      const int j = 16 * m + lane / 4;
      const float2 both = Sums::of(acc, t, m);
      row[j] = 2.0F * Units::kEven * both.x;
      row[j + 8] = 2.0F * Units::kOdd * both.y;
    }
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < 4 * kDim; i += kWarps * 32) {
      const int h = 4 * t + i / kDim;
      if (!heads.has(static_cast<uint32_t>(h))) break;
      float largest = kMinusInf;
#pragma unroll 4
      for (int w = 0; w < kWarps; ++w) largest = fmaxf(largest, shared_max[w][h]);
      const float overall = has_resident ? fmaxf(largest, resident.top[h]) : largest;
      // Warps without a tile have a maximum of -inf and a state of zeros.
      const float top_base = finite_base(overall);
      float o = 0.0F, total = 0.0F;
#pragma unroll 4
      for (int w = 0; w < kWarps; ++w) {
        const float keep = exp2_fast(shared_max[w][h] - top_base);
        o = fmaf(keep, states.o[w][i / kDim][i % kDim], o);
        total = fmaf(keep, shared_sum[w][h], total);
      }
      if (i % kDim == 0) {
        float of_codes = 0.0F;
#pragma unroll 4
        for (int w = 0; w < kWarps; ++w) {
          of_codes =
              fmaf(exp2_fast(shared_max[w][h] - finite_base(largest)), shared_sum[w][h], of_codes);
        }
        own.part_lse[part + i / kDim] = largest + log2f(of_codes);
      }
      if (has_resident) {
        const float keep = exp2_fast(resident.top[h] - top_base);
        o = fmaf(keep, resident.rows[h][i % kDim], o);
        total = fmaf(keep, resident.sum[h], total);
      }
      own.part_o[(part + i / kDim) * kDim + i % kDim] = sign * o;
      if (i % kDim == 0) own.part_sum[part + i / kDim] = make_float2(overall, sign * total);
    }
    __syncthreads();
  }
}

template <int kDim, int kBits, int kHeadTiles>
__global__ void __launch_bounds__(kAttendWarps<kDim> * 32,
                                  attend_occupancy<kDim, kBits, kHeadTiles>())
    attend_kernel(const __grid_constant__ CodesParams s) {
  constexpr bool kDivides = kDividesGroup<kDim>;
  constexpr uint32_t kHeads = 4 * kHeadTiles;
  const StepHeads heads{s, kDivides ? blockIdx.z * kHeads : 0, s.padded_heads};
  attend<kDim, kBits, kHeadTiles>(heads, GridSplit{});
}

/// attend_kernel() for a step with lists.
template <int kDim, int kBits, int kHeadTiles>
__global__ void __launch_bounds__(kAttendWarps<kDim> * 32,
                                  attend_occupancy<kDim, kBits, kHeadTiles>())
    attend_lists_kernel(const __grid_constant__ CodesParams s) {
  constexpr bool kDivides = kDividesListed<kDim, kHeadTiles>;
  constexpr uint32_t kHeads = 4 * kHeadTiles;
  const StepHeads heads{s, kDivides ? blockIdx.z * kHeads : 0, s.padded_heads};
  attend<kDim, kBits, kHeadTiles>(heads, ListSplit{});
}

}  // namespace keyhole::gpu::codes

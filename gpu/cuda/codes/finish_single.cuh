// What follows the pass over the codes, by one thread block per KV head: for GPUs without clusters (compute capability 8.0
// to 8.9), and where a cluster lacks the shared memory. The phases are those of gpu/cuda/codes/finish.cuh:
//
//   weigh    the log-sum-exp of each head, and what each split weighs; the splits' sum
//   choose   this step's N heaviest rows (gpu/cuda/codes/choose_single.cuh)
//   read     K and V of the N rows, all asked for at once, one row a warp at a time, which then are added up
//   merge    splits - N rows by their codes + N rows exactly + resident tokens, one head a warp
//
// MEMORY. Nothing here grows with the number of blocks: the largest shape takes 92 of the 99 KiB that the least of these
// GPUs gives to a thread block (8.6 and 8.9), so there is no capacity that does not fit.
#pragma once

#include "gpu/cuda/codes/choose_single.cuh"
#include "gpu/cuda/codes/exact_rows.cuh"
#include "gpu/cuda/codes/merge_head.cuh"
#include "gpu/cuda/codes/publish.cuh"
#include "gpu/cuda/codes/split_sums.cuh"
#include "gpu/cuda/common/grid_dependency.cuh"

namespace keyhole::gpu::codes {

constexpr size_t kLeastOptIn = size_t{99} << 10U;  ///< bytes of shared memory, of 8.6 and 8.9

template <int kDim, int kKeyBits, int kHeadTiles>
struct SingleShared {
  static constexpr int kHeads = 4 * kHeadTiles;

  SharedQueries<kDim, kKeyBits, kHeadTiles> queries;
  alignas(16) float q[kHeads][kDim];  ///< as they came, times scale log2(e)
  SplitShared<kHeads, kSingleThreads> splits;
  SingleChoice<kHeads> choice;
  RowShared<kDim, kHeads, kSingleWarps> rows;
  alignas(16) float split_o[kHeads][kDim];
  float top[kHeads], total[kHeads], lse[kHeads];  ///< of the codes, base 2
};

template <int kDim, int kKeyBits, int kValueBits, int kHeadTiles>
__global__ void __launch_bounds__(kSingleThreads, 1)
    finish_single_kernel(const __grid_constant__ CodesParams s) {
  using Shared = SingleShared<kDim, kKeyBits, kHeadTiles>;
  static_assert(sizeof(Shared) <= kLeastOptIn);
  static_assert(Shared::kHeads <= static_cast<int>(kSingleWarps), "a warp merges a head");
  static_assert(Shared::kHeads * kDim / 4 <= static_cast<int>(kSingleThreads), "a thread a column");
  extern __shared__ __align__(16) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  auto& choice = shared.choice;

  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t kv_head = blockIdx.x;
  let_next_kernel_start();
  if (kv_head >= s.kv_heads) {  // as many blocks beside those of the heads
    publish_and_advance<kDim>(s, kv_head - s.kv_heads, s.kv_heads);
    return;
  }

  // Queries, the number of blocks and the codes are older than the pass over them, so this may run beside it.
  const uint32_t group_count = *s.block_count * kBlockMaxima;
  uint32_t wanted = group_count == 0 ? 0 : s.exact_rows;  // a block has more rows than that
  RawQueries<kDim, Shared::kHeads, static_cast<int>(kSingleWarps)> raw_queries;
  raw_queries.load(s, kv_head);
  shared.queries.prepare(s, raw_queries, shared.q);
  const float value_scale = value_scale_of(s, kv_head);
  wait_for_kernels_before();

  // ---- weigh
  SplitSums<1, kSingleThreads> sums;
  sums.load<kDim>(s, kv_head, 0);
  const bool merges = warp < s.group;
  ResidentHead resident;
  if (s.resident_o != nullptr && merges) {
    resident.load<kDim>(s, size_t{kv_head} * s.group + warp);
  }
  weigh_splits(s, kv_head, shared.splits, shared);
  __syncthreads();
  sums.add<kDim>(s, kv_head, shared.splits);
  __syncthreads();
  sums.send<kDim>(shared.splits, [&](uint32_t h, uint32_t at, float4 sum) {
    *reinterpret_cast<float4*>(&shared.split_o[h][at]) = sum;
  });

  // ---- choose
  if (wanted != 0) {
    const float* const maxima =
        s.maxima + size_t{kv_head} * s.block_capacity * kBlockMaxima * Shared::kHeads;
    choose_rows<kDim, kKeyBits, kValueBits, kHeadTiles>(s, kv_head, maxima, group_count, wanted,
                                                        shared.queries, shared.lse, choice);
    wanted = choice.found;
  }

  // ---- read
  constexpr uint32_t kRounds = (kMostExactRows + kSingleWarps - 1) / kSingleWarps;
  RawRow<kDim> raw[kRounds];
#pragma unroll
  for (uint32_t i = 0; i < kRounds; ++i) {
    const uint32_t number = warp + i * kSingleWarps;
    if (number < wanted) raw[i].load(s, kv_head, row_of(choice.chosen[number]));
  }
  RowSums of_rows;
#pragma unroll
  for (uint32_t i = 0; i < kRounds; ++i) {
    const uint32_t begin = i * kSingleWarps;
    if (begin >= wanted) break;
    const uint32_t number = begin + warp;
    if (number < wanted) {
      attend_row<kDim, kKeyBits, kValueBits, kHeadTiles>(
          s, kv_head, number, row_of(choice.chosen[number]), raw[i], shared.q,
          choice.logits[choice.places[number]], shared.rows, warp);
    }
    __syncthreads();
    if (merges && 4 * lane < kDim) {
      of_rows.add(shared.rows, min(wanted - begin, kSingleWarps), warp, 4 * lane,
                  finite_base(shared.top[warp]));
    }
    __syncthreads();
  }
  __syncthreads();  // the splits' sum, where no row was read

  // ---- merge
  if (!merges) return;
  // Lanes beyond the head dimension added no row up: their sums of weights are not used.
  const bool inside = 4 * lane < kDim;
  const float4 all = inside ? *reinterpret_cast<const float4*>(&shared.split_o[warp][4 * lane])
                            : make_float4(0.0F, 0.0F, 0.0F, 0.0F);
  const PartOfHead codes{shared.top[warp],
                         shared.total[warp] - of_rows.coded_sum,
                         {all.x - of_rows.coded.x, all.y - of_rows.coded.y, all.z - of_rows.coded.z,
                          all.w - of_rows.coded.w}};
  const PartOfHead exact{of_rows.exact_max,
                         of_rows.exact_sum,
                         {of_rows.exact.x, of_rows.exact.y, of_rows.exact.z, of_rows.exact.w}};
  merge_head<kDim>(s, size_t{kv_head} * s.group + warp, codes, exact, value_scale, resident,
                   shared.split_o[warp]);
}

}  // namespace keyhole::gpu::codes

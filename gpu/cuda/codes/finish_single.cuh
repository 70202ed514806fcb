// What follows the pass over the codes, by one thread block per KV head: for GPUs without clusters (compute
// capability 8.0 to 8.9), and where a cluster lacks shared memory. The phases are those of gpu/cuda/codes/finish.cuh:
//
//   weigh    the log-sum-exp of each head, and what each split weighs; the splits' sum
//   choose   this step's N heaviest rows (gpu/cuda/codes/choose_single.cuh)
//   read     K and V of the N rows, all asked for at once, one row a warp at a time, which then are added up
//   merge    splits - N rows by their codes + N rows exactly + resident tokens, one head a warp
//
// MEMORY. Nothing here grows with the number of blocks: the largest shape takes 92 of the 99 KiB that the least of
// these GPUs gives to a thread block (8.6 and 8.9), so there is no capacity that does not fit. Where all that the
// phases need would be more, they use the same memory in turn: the choice that of the splits' weights, the queries as
// they came, which are read again, that of the rotated ones; and the splits' sums replace the first split's state.
#pragma once

#include "gpu/cuda/codes/choose_single.cuh"
#include "gpu/cuda/codes/doubt.cuh"
#include "gpu/cuda/codes/exact_rows.cuh"
#include "gpu/cuda/codes/list_reach.cuh"
#include "gpu/cuda/codes/merge_head.cuh"
#include "gpu/cuda/codes/publish.cuh"
#include "gpu/cuda/codes/split_sums.cuh"
#include "gpu/cuda/codes/wide_params.h"
#include "gpu/cuda/common/grid_dependency.cuh"

namespace keyhole::gpu::codes {

constexpr size_t kLeastOptIn = size_t{99} << 10U;  ///< bytes of shared memory, of 8.6 and 8.9

/// How many exact rows are in shared memory at once: one for each warp, for every other, or for every fourth.
template <int kDim>
constexpr uint32_t kRowsAtOnce = kDim <= 128   ? kSingleWarps
                                 : kDim <= 256 ? kSingleWarps / 2
                                               : kSingleWarps / 4;

template <int kDim, int kBits, int kHeadTiles>
struct SingleShared {
  static constexpr int kHeads = 4 * kHeadTiles;
  /// Whether the phases use the same memory in turn.
  static constexpr bool kInTurn = kDim * kHeadTiles > 512;
  using Splits = SplitShared<kHeads, kSingleThreads>;
  using Choice = SingleChoice<kHeads>;

  SharedQueries<kDim, kBits, kHeadTiles> queries;
  alignas(16) float own_q[kInTurn ? 1 : kHeads][kInTurn ? 4 : kDim];
  alignas(16) std::byte phases[!kInTurn                          ? sizeof(Splits) + sizeof(Choice)
                               : sizeof(Splits) > sizeof(Choice) ? sizeof(Splits)
                                                                 : sizeof(Choice)];
  RowShared<kDim, kHeads, kRowsAtOnce<kDim>> rows;
  alignas(16) float own_split_o[kInTurn ? 1 : kHeads][kInTurn ? 4 : kDim];
  float top[kHeads], total[kHeads], lse[kHeads];  ///< of the codes, base 2
  CodeFigures figures;

  /// Queries as they came, times scale log2(e): in turn from load_queries() on, which comes after the choice.
  __device__ auto& q() {
    if constexpr (kInTurn)
      return queries.rows;
    else
      return own_q;
  }
  __device__ Splits& splits() { return *reinterpret_cast<Splits*>(phases); }
  __device__ Choice& choice() {
    static_assert(alignof(Choice) <= 16 && sizeof(Splits) % 16 == 0);
    return *reinterpret_cast<Choice*>(phases + (kInTurn ? 0 : sizeof(Splits)));
  }
  /// The row for the sum of the splits of a head.
  __device__ float* split_o(const CodesParams& s, uint32_t kv_head, uint32_t h) {
    if constexpr (kInTurn)
      return s.part_o + (size_t{kv_head} * s.splits * s.group + h) * kDim;
    else
      return own_split_o[h];
  }
};

/// Leaves queries as they came, times scale log2(e), in q, by the warps of a thread block, each a head.
template <int kDim, int kHeads>
__device__ inline void load_queries(const CodesParams& s, uint32_t kv_head,
                                    float (&q)[kHeads][kDim]) {
  const uint32_t h = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (h >= kHeads) return;
  const float unit = s.logits.scale * kLog2E;
  float x[kLaneParts<kDim>] = {};
#pragma unroll
  for (uint32_t u = 0; u < kLaneQuads<kDim>; ++u) {
    if (4 * lane >= kDim || h >= s.group) continue;
    const size_t at = row_at(s.q, query_head(s, kv_head, h)) + size_t(4) * lane + 128 * u;
    convert_quad(load_raw(s.q.data, s.q.dtype, at), s.q.dtype, &x[4 * u]);
  }
  if (4 * lane < kDim) store_quads<kDim>(q[h], static_cast<int>(lane), x, unit);
}

/// The kernels' work for a KV head of a step.
template <int kDim, int kBits, int kHeadTiles>
__device__ __forceinline__ void finish_single(const CodesParams& s, uint32_t kv_head) {
  using Shared = SingleShared<kDim, kBits, kHeadTiles>;
  static_assert(sizeof(Shared) <= kLeastOptIn);
  static_assert(Shared::kHeads <= static_cast<int>(kSingleWarps), "a warp merges a head");
  extern __shared__ __align__(16) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  auto& choice = shared.choice();
  auto& q = shared.q();

  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t group_count = pairs_of(s, kv_head);
  const bool by_table = reads_by_table(s, kv_head);
  uint32_t wanted = group_count == 0 ? 0 : s.exact_rows;  // a block has more rows than that
  RawQueries<kDim, Shared::kHeads, static_cast<int>(kSingleWarps)> raw_queries;
  const StepHeads heads{s};
  raw_queries.load(heads, kv_head);
  const CodeFigures figures = figures_of(s, kv_head);
  shared.queries.prepare(heads, raw_queries, q);
  if (threadIdx.x == 0) shared.figures = figures;
  if (threadIdx.x >= s.group && threadIdx.x < Shared::kHeads) shared.lse[threadIdx.x] = -kMinusInf;
  const float value_scale = value_scale_of(s, kv_head);
  wait_for_kernels_before();

  // ---- weigh
  // Works on a part of the columns at a time where there are more columns than threads.
  constexpr uint32_t kParts = (Shared::kHeads * kDim / 4 + kSingleThreads - 1) / kSingleThreads;
  SplitSums<kParts, kSingleThreads> sums;
  sums.template load<kDim>(s, kv_head, AllSplits{}, 0);
  const bool merges = warp < s.group;
  ResidentHead<kDim> resident;
  // The resident state is asked for ahead where there are registers to keep it in.
  const auto load_resident = [&] {
    if (s.resident_o != nullptr && merges) resident.load(s, size_t{kv_head} * s.group + warp);
  };
  if (kDim <= 128) load_resident();
  SplitFigures figures_of_splits;
  figures_of_splits.load(s, kv_head, AllSplits{});
  weigh_splits<kDim>(s, kv_head, AllSplits{}, 0, figures_of_splits, shared.splits(), shared);
  __syncthreads();
#pragma unroll
  for (uint32_t part = 0; part < kParts; ++part) {
    if (part != 0) {
      __syncthreads();
      sums.template load<kDim>(s, kv_head, AllSplits{}, part);
    }
    sums.template add<kDim>(s, kv_head, AllSplits{}, 0, shared.splits());
    __syncthreads();
    sums.template send<kDim>(shared.splits(), [&](uint32_t h, uint32_t at, float4 sum) {
      *reinterpret_cast<float4*>(shared.split_o(s, kv_head, h) + at) = sum;
    });
  }

  // ---- choose
  if (Shared::kInTurn) __syncthreads();
  if (wanted != 0) {
    const float* const maxima = s.maxima + size_t{kv_head} * most_groups(s) * Shared::kHeads;
    choose_rows<kDim, kBits, kHeadTiles>(s, kv_head, maxima, group_count, by_table, wanted,
                                         shared.queries, shared.lse, choice);
    wanted = choice.found;
    if (s.doubt.board != nullptr) note_chosen(s, kv_head, choice.chosen, wanted);
    if constexpr (Shared::kInTurn) {
      load_queries(s, kv_head, q);
      __syncthreads();
    }
  }

  // ---- read
  constexpr uint32_t kRounds = (kMostDeviceRows + kSingleWarps - 1) / kSingleWarps;
  // How many rounds have their rows under way at once, as far as there are registers.
  constexpr uint32_t kAhead = kDim <= 128 ? kRounds : 1;
  constexpr uint32_t kAtOnce = kRowsAtOnce<kDim>;
  // Instructions that run once come from memory: loops are not unrolled where there is one round at a time.
  constexpr int kUnrolled = kAhead == 1 ? 1 : static_cast<int>(kRounds);
  if (s.host_rows.requests != nullptr) {
    ask_host(s, kv_head, choice.chosen, wanted, 0, shared.top);
    count_host_step(s, kv_head);
  }
  RawRow<kDim> raw[kAhead];
  const auto ask = [&](uint32_t round) {
    const uint32_t number = warp + round * kSingleWarps;
    if (number >= wanted) return;
    const uint32_t row = row_in(s, kv_head, row_of(choice.chosen[number]), by_table);
    raw[round % kAhead].load(s, kv_head, row, number);
  };
#pragma unroll
  for (uint32_t i = 0; i < kAhead; ++i) ask(i);
  RowSums of_rows[kLaneQuads<kDim>];
#pragma unroll kUnrolled
  for (uint32_t i = 0; i < kRounds; ++i) {
    if (i * kSingleWarps >= wanted) break;
    const uint32_t number = i * kSingleWarps + warp;
#pragma unroll kUnrolled
    for (uint32_t some = 0; some < kSingleWarps; some += kAtOnce) {
      const bool here = kAtOnce == kSingleWarps || warp / kAtOnce == some / kAtOnce;
      const uint32_t slot = kAtOnce == kSingleWarps ? warp : warp % kAtOnce;
      if (here && number < wanted) {
        const uint32_t place = row_of(choice.chosen[number]);
        attend_row<kDim, kBits, kHeadTiles>(
            s, kv_head, number, place, row_in(s, kv_head, place, by_table), by_table,
            raw[i % kAhead], q, choice.logits[choice.places[number]], shared.rows, slot);
      }
      __syncthreads();
      const uint32_t begin = i * kSingleWarps + some;
      if (merges && 4 * lane < kDim && (kAtOnce == kSingleWarps || begin < wanted)) {
#pragma unroll
        for (uint32_t u = 0; u < kLaneQuads<kDim>; ++u) {
          of_rows[u].add(shared.rows, min(wanted - begin, kAtOnce), warp, 128 * u + 4 * lane,
                         finite_base(shared.top[warp]));
        }
      }
      __syncthreads();
    }
    if (i + kAhead < kRounds) ask(i + kAhead);
  }
  __syncthreads();  // the splits' sum, where no row was read

  // ---- merge
  if (!merges) return;
  if (kDim > 128) load_resident();
  // Lanes beyond the head dimension add no row: their sums of weights are not used.
  const bool inside = 4 * lane < kDim;
  float* const split_o = shared.split_o(s, kv_head, warp);
  PartOfHead<kDim> codes{shared.top[warp], shared.total[warp] - of_rows[0].coded_sum, {}};
  PartOfHead<kDim> exact{of_rows[0].exact_max, of_rows[0].exact_sum, {}};
#pragma unroll
  for (int u = 0; u < kLaneQuads<kDim>; ++u) {
    const float* const row = split_o + 128 * u + 4 * lane;
    const float4 all =
        inside ? *reinterpret_cast<const float4*>(row) : make_float4(0.0F, 0.0F, 0.0F, 0.0F);
    const float4 coded = of_rows[u].coded, exactly = of_rows[u].exact;
    float* o = codes.o + 4 * u;
    o[0] = all.x - coded.x, o[1] = all.y - coded.y, o[2] = all.z - coded.z, o[3] = all.w - coded.w;
    o = exact.o + 4 * u;
    o[0] = exactly.x, o[1] = exactly.y, o[2] = exactly.z, o[3] = exactly.w;
  }
  merge_head<kDim>(s, kv_head, warp, codes, exact, value_scale, resident, split_o);
  if (s.doubt.board == nullptr || wanted == 0) return;
  const HeadSums of_head{codes.top,   codes.total,      of_rows[0].coded_sum, exact.top,
                         exact.total, shared.lse[warp], resident.lse};
  HeadAsked asked =
      ask_doubt<kDim, kBits>(s, of_head, weight_of(choice.chosen[wanted - 1]),
                             shared.queries.constants[warp].noise, wanted, shared.figures);
  if (by_table && may_hide(s, kv_head, reach_of_lists(s, kv_head, true, warp), asked.lse)) {
    asked.reasons |= DoubtRecord::kDoubted;
  }
  put_on_board<kDim>(s, kv_head, warp, asked, q[0]);
}

/// Grid: the KV heads, and as many thread blocks beside them where the step publishes.
template <int kDim, int kBits, int kHeadTiles>
__global__ void __launch_bounds__(kSingleThreads, 1)
    finish_single_kernel(const __grid_constant__ CodesParams s) {
  let_next_kernel_start();
  if (blockIdx.x >= s.kv_heads) {
    publish_and_advance<kDim>(s, blockIdx.x - s.kv_heads, s.kv_heads);
    return;
  }
  finish_single<kDim, kBits, kHeadTiles>(s, blockIdx.x);
}

/// The same behind the pass for many query rows (gpu/cuda/codes/wide.cuh). Grid: the KV heads of each part, and as many
/// thread blocks behind them as there are KV heads where the step publishes.
template <int kDim, int kBits, int kHeadTiles>
__global__ void __launch_bounds__(kSingleThreads, 1)
    finish_single_parts_kernel(const __grid_constant__ WideParams p) {
  let_next_kernel_start();
  const uint32_t heads = p.step.kv_heads, part = min(blockIdx.x / heads, p.count);
  if (part == p.count) {
    publish_and_advance<kDim>(p.step, blockIdx.x - part * heads, heads);
    return;
  }
  finish_single<kDim, kBits, kHeadTiles>(p.parts[part], blockIdx.x - part * heads);
}

}  // namespace keyhole::gpu::codes

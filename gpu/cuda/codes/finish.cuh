// What follows the pass over the codes, by a cluster of 8 thread blocks per KV head (compute capability 9.0 or newer;
// others have gpu/cuda/codes/finish_single.cuh):
//
//   weigh    the log-sum-exp of each head, and what each split weighs
//   choose   this step's N heaviest rows (gpu/cuda/codes/choose.cuh), while the splits' rows are summed up
//   read     K and V of the N rows, one warp a row, from pinned host memory or the device's, or as the host has read
//            them
//   merge    splits - N rows by their codes + N rows exactly + resident tokens; the blocks have the heads in turn
//            (gpu/cuda/codes/merge_sent.cuh)
//   settle   a second look, where codes could not tell which rows weigh (gpu/cuda/codes/settle_head.cuh)
//
// The kernel is a chain of latencies: a trip to memory takes half a microsecond, over the bus two, a barrier of the
// cluster a quarter. So each phase asks for all that it needs at once, and asks for what it may need before it is
// known.
#pragma once

#include "gpu/cuda/codes/doubt.cuh"
#include "gpu/cuda/codes/finish_shared.cuh"
#include "gpu/cuda/codes/merge_sent.cuh"
#include "gpu/cuda/codes/publish.cuh"
#include "gpu/cuda/codes/settle_head.cuh"
#include "gpu/cuda/common/grid_dependency.cuh"

namespace keyhole::gpu::codes {

/// The largest weight of any head in each of a thread's groups of rows.
template <int kDim, int kHeadTiles>
struct GroupMaxima {
  /// Groups under way at once. A thread that works on 256 components has registers for more.
  static constexpr uint32_t kBatch = kHeadTiles == 2 && kDim > 128 ? 4 : 4 / kHeadTiles;
  float4 x[kBatch][kHeadTiles];

  __device__ void load(const CodesParams& s, const float* maxima, const Deal& deal, uint32_t turn,
                       uint32_t group_count) {
#pragma unroll
    for (uint32_t b = 0; b < kBatch; ++b) {
      const uint32_t group = deal.group_of((turn + b) * kFinishThreads + threadIdx.x);
      const auto* from = reinterpret_cast<const float4*>(maxima) + size_t{group} * kHeadTiles;
#pragma unroll
      for (int t = 0; t < kHeadTiles; ++t) {
        if (group < group_count) x[b][t] = from[t];
      }
    }
  }
  __device__ void weigh(const CodesParams& s, const float* lse, const Deal& deal, uint32_t turn,
                        uint32_t group_count, float* values) const {
#pragma unroll
    for (uint32_t b = 0; b < kBatch; ++b) {
      const uint32_t i = (turn + b) * kFinishThreads + threadIdx.x;
      if (deal.group_of(i) >= group_count) continue;
      values[i] = group_weight(x[b], lse);
    }
  }
};

/// Sends the states of this block's `count` rows to the blocks that merge the heads.
template <int kDim, int kBits, int kHeadTiles>
__device__ inline void send_rows(const CodesParams& s, uint32_t rank, uint32_t count,
                                 FinishShared<kDim, kBits, kHeadTiles>& shared) {
  constexpr uint32_t kQuads = kDim / 4;
  for (uint32_t i = threadIdx.x; i < s.group * kQuads; i += kFinishThreads) {
    const uint32_t h = i / kQuads, at = i % kQuads * 4;
    RowSums sums;
    sums.add(shared.rows, count, h, at, finite_base(shared.top[h]));
    const uint32_t own = h / kFinishBlocks, to = h % kFinishBlocks;
    *reinterpret_cast<float4*>(in_block(&shared.coded_o[rank][own][at], to)) = sums.coded;
    *reinterpret_cast<float4*>(in_block(&shared.exact_o[rank][own][at], to)) = sums.exact;
    if (at == 0) {
      *in_block(&shared.coded_sum[rank][own], to) = sums.coded_sum;
      *in_block(&shared.exact_max[rank][own], to) = sums.exact_max;
      *in_block(&shared.exact_sum[rank][own], to) = sums.exact_sum;
    }
  }
}

/// Reads the state of number `h` of a KV head's group, to which a second look at listed pairs adds, by a warp. row:
/// `[kDim]` in shared memory, which is overwritten.
template <int kDim>
__device__ inline void leave_state(const CodesParams& s, uint32_t kv_head, uint32_t h,
                                   const PartOfHead<kDim>& codes, PartOfHead<kDim> exact,
                                   float value_scale, float* row) {
  const uint32_t lane = threadIdx.x % 32;
  rotate_quads<kDim>(exact.o, row, static_cast<int>(lane), false);
  const float top = fmaxf(codes.top, exact.top), base = finite_base(top);
  const float of_codes = exp2_fast(codes.top - base), of_exact = exp2_fast(exact.top - base);
  const float unit = __fdividef(of_exact, value_scale);
  const size_t slot = (size_t{kv_head} * s.splits + settle_splits<kFinishBlocks>(s)) * s.group + h;
#pragma unroll
  for (uint32_t u = 0; u < kLaneQuads<kDim>; ++u) {
    if (4 * lane >= kDim) continue;
    const float* c = codes.o + 4 * u;
    const float* e = exact.o + 4 * u;
    reinterpret_cast<float4*>(s.part_o + slot * kDim)[32 * u + lane] = {
        fmaf(of_codes, c[0], e[0] * unit), fmaf(of_codes, c[1], e[1] * unit),
        fmaf(of_codes, c[2], e[2] * unit), fmaf(of_codes, c[3], e[3] * unit)};
  }
  if (lane == 0) {
    s.part_sum[slot] = make_float2(top, fmaf(of_codes, codes.total, of_exact * exact.total));
  }
}

/// Writes what the settling of a KV head needs to its record, by all blocks of its cluster, which know the reasons.
/// Returns true if the cluster is to settle it; where the host reads rows it returns false and counts it.
template <int kDim, int kBits, int kHeadTiles>
__device__ inline bool leave_record(const CodesParams& s, uint32_t kv_head, uint32_t rank,
                                    uint32_t reasons, uint32_t chosen,
                                    const FinishShared<kDim, kBits, kHeadTiles>& shared) {
  DoubtRecord& record = s.doubt.records[kv_head];
  if (rank == 0 && threadIdx.x == 0) record.reasons = reasons;
  if (s.keys == nullptr) {
    if (rank == 0 && threadIdx.x == 0) close_record(s, kv_head);
    return false;
  }
  const uint32_t head = rank + threadIdx.x * kFinishBlocks;
  if (threadIdx.x < shared.kOwn && head < s.group) {
    record.lse[head] = shared.asked_lse[threadIdx.x];
    record.far[head] =
        doubt_reach(shared.queries.constants[head].noise, __uint_as_float(shared.figures.widest));
  }
  if (rank != 0) return true;
  note_chosen(s, kv_head, shared.choice.chosen, chosen);
  save_queries<kDim>(s, kv_head, shared.q[0], threadIdx.x, kFinishThreads);
  return true;
}

/// The kernel's work for one step. splits: how many splits the pass has left; kv_head: the cluster's.
template <int kDim, int kBits, int kHeadTiles, class Splits>
__device__ __forceinline__ void finish(const CodesParams& s, const Splits& splits,
                                       uint32_t kv_head) {
  using Shared = FinishShared<kDim, kBits, kHeadTiles>;
  constexpr uint32_t kBatch = GroupMaxima<kDim, kHeadTiles>::kBatch;
  extern __shared__ __align__(16) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  float* const values = reinterpret_cast<float*>(memory + sizeof(Shared));
  auto& choice = shared.choice;

  const uint32_t warp = threadIdx.x / 32;
  const Deal deal{blockIdx.x % kFinishBlocks};
  if (kv_head == s.kv_heads) {  // the cluster beside those of the heads
    let_next_kernel_start();
    publish_and_advance<kDim>(s, deal.rank, kFinishBlocks);
    return;
  }
  cluster_arrive_relaxed();  // waited for before the first write to another block
  let_next_kernel_start();

  // Queries, the number of blocks and the codes are older than the pass over them, so reading them may overlap with
  // it.
  const uint32_t group_count = pairs_of(s, kv_head);
  const bool by_table = reads_by_table(s, kv_head);
  const uint32_t turns = (group_count + kClusterThreads - 1) / kClusterThreads;
  uint32_t wanted = group_count == 0 ? 0 : s.exact_rows;  // a block has more rows than that
  // One query at a time: instructions that run once come from memory, some 4 ns each.
  RawQueries<kDim, Shared::kHeads, static_cast<int>(kFinishWarps), 1> raw_queries;
  const StepHeads heads{s};
  raw_queries.load(heads, kv_head);
  const CodeFigures figures = figures_of(s, kv_head);
  // Thread blocks start in the order of their numbers: those that advance the ring come last.
  const RingState ring = s.has_resident ? s.resident.states[kv_head] : RingState{};
  shared.queries.prepare(heads, raw_queries, shared.q);
  if (threadIdx.x == 0) choice.group_count = choice.row_count = 0;
  if (threadIdx.x == 0) shared.figures = figures;
  if (threadIdx.x == 0) shared.ring = ring;
  if (threadIdx.x < Shared::kHeads) {
    shared.reasons[threadIdx.x] = 0;
    if (threadIdx.x >= s.group) shared.lse[threadIdx.x] = -kMinusInf;
  }
  const float value_scale = value_scale_of(s, kv_head);
  wait_for_kernels_before();

  // ---- weigh
  const float* const maxima = s.maxima + size_t{kv_head} * most_groups(s) * (4 * kHeadTiles);
  SplitFigures figures_of_splits;
  figures_of_splits.load(s, kv_head, splits);  // needed first of all
  GroupMaxima<kDim, kHeadTiles> first;
  if (wanted != 0) first.load(s, maxima, deal, 0, group_count);
  SplitSums<kFinishBlocks, kFinishThreads> sums;
  sums.load<kDim>(s, kv_head, splits, deal.rank);
  MergeSent<kDim, kBits, kHeadTiles> merge(deal.rank);
  merge.load(s, kv_head, by_table);
  const bool has_rows = wanted != 0;
  // Sends a sum to the block that merges the head.
  const auto send_sum = [&](uint32_t h, uint32_t at, float4 sum) {
    float* to = &shared.split_o[h / kFinishBlocks][at];
    *reinterpret_cast<float4*>(in_block(to, h % kFinishBlocks)) = sum;
  };
  weigh_splits<kDim>(s, kv_head, splits, deal.rank, figures_of_splits, shared.splits, shared);
  __syncthreads();
  if (wanted == 0) {
    if (s.host_rows.requests != nullptr)
      ask_host(s, kv_head, choice.chosen, 0, deal.rank, shared.top);
    cluster_wait();  // all blocks have started
    sums.add<kDim>(s, kv_head, splits, deal.rank, shared.splits);
    __syncthreads();
    sums.send<kDim>(shared.splits, send_sum);
  } else {
    // ---- choose
    first.weigh(s, shared.lse, deal, 0, group_count, values);
    for (uint32_t turn = kBatch; turn < turns; turn += kBatch) {
      GroupMaxima<kDim, kHeadTiles> more;
      more.load(s, maxima, deal, turn, group_count);
      more.weigh(s, shared.lse, deal, turn, group_count, values);
    }
    __syncthreads();
    uint32_t largest = 0;
#pragma unroll 1
    for (uint32_t turn = 0; turn < turns; ++turn) {
      const uint32_t i = deal.value_of(turn);
      if (deal.group_of(i) < group_count) largest = max(largest, rising(values[i]));
    }
    cluster_wait();  // all blocks have started
    const bool few = wanted <= kFewRows;
    send_share(choice, largest, deal.rank, few);
    cluster_arrive();
    // Meanwhile the splits are summed.
    sums.add<kDim>(s, kv_head, splits, deal.rank, shared.splits);
    __syncthreads();
    sums.send<kDim>(shared.splits, send_sum);
    cluster_wait();
    if (few) {
      find_least<kShares / 2, kFinishThreads>(choice, wanted);
    } else {
      find_least<kShares, kFinishThreads>(choice, wanted);
    }
    __syncthreads();
    while (true) {
      const uint64_t least = choice.least;
#pragma unroll 1
      for (uint32_t turn = 0; turn < turns; ++turn) {
        const uint32_t i = deal.value_of(turn);
        // If not even the first row of the group could reach the bound, none can.
        const uint32_t group = deal.group_of(i);
        if (group < group_count && order_of(values[i], group * kMaximumRows) >= least) {
          const uint32_t slot = atomicAdd(&choice.group_count, 1U);
          if (slot < kMostGroups) choice.groups[slot] = group;
        }
      }
      __syncthreads();
      const uint32_t groups = min(choice.group_count, kMostGroups);
#pragma unroll 1
      for (uint32_t g = warp; g < groups; g += kFinishWarps) {
        list_rows<kDim, kBits, kHeadTiles>(s, kv_head, choice.groups[g], by_table, shared.queries,
                                           shared.lse, choice);
      }
      __syncthreads();
      if (threadIdx.x == 0 && choice.group_count > kMostGroups) choice.row_count = kMostListed + 1;
      cluster_barrier();
      if (!rank_listed(choice, wanted)) break;
      // There are many equal weights, or heavy rows side by side. The last of the first few is then a better bound,
      // which the rows that were not listed must reach, too.
      cluster_barrier();
      if (threadIdx.x == 0) {
        choice.group_count = choice.row_count = 0;
        choice.least = choice.chosen[wanted - 1];
      }
      __syncthreads();
    }
    // ---- read
    wanted = choice.found;
    if (s.host_rows.requests != nullptr) {
      ask_host(s, kv_head, choice.chosen, wanted, deal.rank, shared.top);
    }
    const uint32_t rows =
        wanted > deal.rank ? (wanted - deal.rank + kFinishBlocks - 1) / kFinishBlocks : 0;
    if (warp < rows) {
      const uint32_t number = deal.rank + warp * kFinishBlocks;
      const uint32_t place = row_of(choice.chosen[number]),
                     row = row_in(s, kv_head, place, by_table);
      const uint32_t entry = choice.places[number];
      RawRow<kDim> raw;
      raw.load(s, kv_head, row, number);
      const float* coded = in_block(choice.logits[entry % kMostListed], entry / kMostListed);
      attend_row<kDim, kBits, kHeadTiles>(s, kv_head, number, place, row, by_table, raw, shared.q,
                                          coded, shared.rows, warp);
    }
    __syncthreads();
    send_rows(s, deal.rank, rows, shared);
  }

  // ---- merge
  cluster_barrier();
  if (deal.rank == 0) count_host_step(s, kv_head);  // all blocks have asked
  const bool asks = s.doubt.board != nullptr && wanted != 0;
  merge.gather(s, has_rows, shared);
  if (asks) {
    merge.ask(s, [&](const HeadSums& of_head, uint32_t own, float reach) {
      const uint32_t h = deal.rank + own * kFinishBlocks, lane = threadIdx.x % 32;
      HeadAsked asked =
          ask_doubt<kDim, kBits>(s, of_head, weight_of(choice.chosen[wanted - 1]),
                                 shared.queries.constants[h].noise, wanted, shared.figures);
      if (by_table && may_hide(s, kv_head, reach, asked.lse)) {
        asked.reasons |= DoubtRecord::kDoubted;
      }
      if (lane == 0) shared.asked_lse[own] = asked.lse;
      if (asked.reasons != 0 && lane < kFinishBlocks) {
        *in_block(&shared.reasons[h], lane) = asked.reasons;
      }
    });
    // The reasons of the blocks for doubt travel while these are merged.
    cluster_arrive();
  }
  merge.write(s, kv_head, value_scale, shared);
  if (!asks) return;
  cluster_wait();
  uint32_t reasons = 0;
  for (uint32_t h = 0; h < s.group; ++h) reasons |= shared.reasons[h];
  if (reasons == 0) return;
  const RingState before = shared.ring;
  if (!leave_record(s, kv_head, deal.rank, reasons, wanted, shared)) return;
  if (s.splits > 1) {
    merge.use_parts(s, has_rows, shared,
                    [&](uint32_t h, uint32_t own, const PartOfHead<kDim>& codes,
                        const PartOfHead<kDim>& exact) {
                      leave_state<kDim>(s, kv_head, h, codes, exact, value_scale,
                                        shared.split_o[own]);
                    });
  }
  cluster_barrier();
  if (threadIdx.x >= kAttendWarps<kDim> * 32) return;  // a pass has no more
  settle_head<kDim, kBits, kFinishBlocks>(s, kv_head, deal.rank, before);
}

template <int kDim, int kBits, int kHeadTiles>
__global__ void __launch_bounds__(kFinishThreads, kHeadTiles == 1 ? 2 : 1)
    finish_kernel(const __grid_constant__ CodesParams s) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  finish<kDim, kBits, kHeadTiles>(s, AllSplits{}, blockIdx.x / kFinishBlocks);
#endif
}

}  // namespace keyhole::gpu::codes

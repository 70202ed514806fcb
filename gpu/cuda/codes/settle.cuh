// The kernel after a step that settles KV heads in doubt (gpu/cuda/codes/doubt.cuh), where there are no clusters of
// thread blocks, which settle their heads themselves (gpu/cuda/codes/settle_head.cuh). With none in doubt it ends at
// once. Its phases, each for all parts of all these heads:
//
//   look     once more at all codes: rows that might weigh are found, the rest is summed up
//            (gpu/cuda/codes/settle_find.cuh)
//   read     the rows that were found, wherever they are (gpu/cuda/codes/settle_rows.cuh)
//   merge    each head; where the log-sum-exp has fallen by a nat, because the codes' errors had made it too large,
//            more rows might weigh: such a part goes through the phases again, the last time reading all rows
//
// All thread blocks of the device share each phase: pieces of work have numbers, and a block takes the next one. A
// block that finds none left waits until all pieces are done. Pieces are only ever held by blocks that run, so no
// block waits for one that has not started. The result of a piece has a place of its own, and results are added up in
// an order that depends on nothing but the step and which of its heads are in doubt: the bits do not depend on which
// block did the work.
#pragma once

#include "gpu/cuda/codes/settle_phases.cuh"
#include "gpu/cuda/common/flags.cuh"
#include "gpu/cuda/common/grid_dependency.cuh"

namespace keyhole::gpu::codes {

/// How many splits the rows of a KV head have when so many are in doubt: they share the places for states that the
/// step has.
template <int kDim>
__device__ inline uint32_t doubt_splits(const CodesParams& s, uint32_t heads) {
  if (heads == 0) return 1;
  constexpr uint32_t kWarps = kAttendWarps<kDim>;
  const uint32_t most = min(s.kv_heads * s.splits / heads, kMostSplits);
  const uint32_t pairs = __ldcv(s.block_count) * kBlockMaxima;
  const uint32_t resident =
      s.has_resident ? (s.resident.ring.sink + s.resident.ring.capacity) / 32 : 0;
  return max(min((pairs + kWarps - 1) / kWarps + resident, most), 1U);
}

struct SettleShared {
  alignas(16) unsigned char step[sizeof(CodesParams)];  ///< as look_again() leaves it
  uint32_t ticket;
  bool is_last;
};

/// Clears a step's board; by one thread block when all have left.
__device__ inline void clear_board(const CodesParams& s, uint32_t heads) {
  DoubtBoard& board = *s.doubt.board;
  for (uint32_t i = threadIdx.x; i < heads; i += blockDim.x) {
    close_record(s, __ldcg(&s.doubt.list[i]));
  }
  __syncthreads();
  if (threadIdx.x < kDoubtPasses) board.again[threadIdx.x] = 0;
  if (threadIdx.x == 0) board.heads = board.next = board.done = board.left = 0;
}

template <int kDim, int kBits>
__global__ void __launch_bounds__(kAttendWarps<kDim> * 32, 2)
    settle_kernel(const __grid_constant__ CodesParams s) {
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ SettleShared shared;
  let_next_kernel_start();
  wait_for_kernels_before();
  DoubtBoard& board = *s.doubt.board;
  const uint32_t heads = __ldcg(&board.heads);
  if (heads == 0) return;

  const uint32_t splits = doubt_splits<kDim>(s, heads), looks = doubt_parts(s) * splits;
  if (threadIdx.x == 0) shared.ticket = atomicAdd(&board.next, 1U);
  __syncthreads();
  uint32_t end = 0;  // of the pieces of all phases so far
  // share(each, work): calls work(place on the board, number) for all pieces of a phase, `each` for a KV head, by all
  // thread blocks; returns when all are done.
  const auto share = [&](uint32_t each, const auto& work) {
    const uint32_t begin = end;
    end += heads * each;
    for (uint32_t ticket = shared.ticket; ticket < end; ticket = shared.ticket) {
      work((ticket - begin) / each, (ticket - begin) % each);
      __syncthreads();
      if (threadIdx.x == 0) {
        (void)arrive(&board.done);
        shared.ticket = atomicAdd(&board.next, 1U);
      }
      __syncthreads();
    }
    if (threadIdx.x == 0) {
      const cuda::atomic_ref<uint32_t, cuda::thread_scope_device> done(board.done);
      while (done.load(cuda::memory_order_acquire) < end) __nanosleep(200);
      __threadfence();
    }
    __syncthreads();
  };
  const auto unit_of = [&](uint32_t place, uint32_t part, uint32_t pass) {
    return DoubtUnit{__ldcg(&s.doubt.list[place]), place * splits, part, pass, splits, false};
  };
  // Where the host reads rows, heads in doubt are only counted.
  const uint32_t passes = s.keys == nullptr ? 0 : kDoubtPasses;
#pragma unroll 1
  for (uint32_t pass = 0; pass < passes; ++pass) {
    share(looks, [&](uint32_t place, uint32_t number) {
      const DoubtUnit unit = unit_of(place, number / splits, pass);
      if (rests(s, unit)) return;
      auto& step = *reinterpret_cast<CodesParams*>(shared.step);
      look_again<kDim>(s, unit.kv_head, nullptr, step);
      const StepHeads of_part{step, kDoubtHeads * unit.part, 0};
      attend<kDim, kBits, 1>(of_part, DoubtSplit{step, unit, number % splits});
    });
    share(looks, [&](uint32_t place, uint32_t number) {
      const DoubtUnit unit = unit_of(place, number / splits, pass);
      if (rests(s, unit)) return;
      read_found(s, unit, number % splits, *reinterpret_cast<FoundShared<kDim>*>(memory));
    });
    share(s.group, [&](uint32_t place, uint32_t h) {
      const DoubtUnit unit = unit_of(place, h / kDoubtHeads, pass);
      if (rests(s, unit)) return;
      if (merge_again(s, unit, h, *reinterpret_cast<MergeShared<kDim>*>(memory))) {
        atomicAdd(&board.again[pass], 1U);
      }
    });
    if (__ldcg(&board.again[pass]) == 0) break;
  }
  __syncthreads();
  if (threadIdx.x == 0) shared.is_last = arrive(&board.left) + 1 == gridDim.x;
  __syncthreads();
  if (shared.is_last) clear_board(s, heads);
}

template <int kDim, int kBits>
SettleKernel settle_kernel_of() {
  SettleKernel k;
  k.settle = reinterpret_cast<const void*>(&settle_kernel<kDim, kBits>);
  k.warps = kAttendWarps<kDim>;
  k.shared = settle_shared<kDim, kBits>();
  return k;
}

template <int kBits>
SettleKernel settle_kernel_for(uint32_t dim) {
  switch (dim) {
    case 64: return settle_kernel_of<64, kBits>();
    case 80: return settle_kernel_of<80, kBits>();
    case 96: return settle_kernel_of<96, kBits>();
    case 128: return settle_kernel_of<128, kBits>();
    case 256: return settle_kernel_of<256, kBits>();
    case 512: return settle_kernel_of<512, kBits>();
    default: return {};
  }
}

}  // namespace keyhole::gpu::codes

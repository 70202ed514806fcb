// What follows a step of which some KV heads are in doubt (gpu/cuda/codes/doubt.cuh), where these are not settled by
// the clusters that have merged them (gpu/cuda/codes/settle_head.cuh); with none the kernel ends at once. In turn,
// for all parts of all these heads:
//
//   look     once more at all codes: what might weigh is found, the rest summed up (gpu/cuda/codes/settle_find.cuh)
//   read     the rows that were found, wherever they are (gpu/cuda/codes/settle_rows.cuh)
//   merge    each head; where the log-sum-exp has fallen by a nat, as the codes' errors had made it too large, what might
//            weigh is more: such a part takes another turn, the last of which reads all rows
//
// All thread blocks of the device share each of these: pieces of work have numbers, and a block takes the next one. A
// block that has nothing to do waits until all pieces are done, which blocks that are there are at; so no block waits
// for one that has not started. What a piece leaves has its own place, and is added up in an order that depends on
// nothing but the step and which of its heads are in doubt: the same bits, whoever has done it.
#pragma once

#include "gpu/cuda/codes/batch_params.h"
#include "gpu/cuda/codes/settle_phases.cuh"
#include "gpu/cuda/common/flags.cuh"
#include "gpu/cuda/common/grid_dependency.cuh"

namespace keyhole::gpu::codes {

struct OneStep {
  const CodesParams& step;
  __device__ static uint32_t count() { return 1; }
  __device__ const CodesParams& of(uint32_t) const { return step; }
};
struct SeveralSteps {
  const BatchParams& batch;
  [[nodiscard]] __device__ uint32_t count() const { return batch.count; }
  [[nodiscard]] __device__ const CodesParams& of(uint32_t i) const { return batch.steps[i]; }
};

/// How many splits the rows of a KV head have where so many are in doubt: the step's places for states are theirs.
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
  uint32_t heads[kMostJointSteps];                      ///< of a step, on its board
  uint32_t splits[kMostJointSteps];
  uint32_t ticket;
  bool is_last;
};

/// Which piece of a phase is number `item`. `each`: pieces of a KV head of a step.
struct DoubtPiece {
  uint32_t step, place, number;

  template <class Each>
  __device__ static DoubtPiece of(uint32_t item, const SettleShared& shared, const Each& each) {
    uint32_t step = 0;
    while (item >= shared.heads[step] * each(step)) item -= shared.heads[step] * each(step), ++step;
    return {step, item / each(step), item % each(step)};
  }
};

/// Clears a step's board, by one thread block when all have left.
__device__ inline void clear_board(const CodesParams& s, uint32_t heads) {
  DoubtBoard& board = *s.doubt.board;
  for (uint32_t i = threadIdx.x; i < heads; i += blockDim.x) {
    close_record(s, __ldcg(&s.doubt.list[i]));
  }
  __syncthreads();
  if (threadIdx.x < kDoubtPasses) board.again[threadIdx.x] = 0;
  if (threadIdx.x == 0) board.heads = board.next = board.done = board.left = 0;
}

template <int kDim, int kBits, class Steps>
__device__ __forceinline__ void settle(const Steps& steps) {
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ SettleShared shared;
  let_next_kernel_start();
  wait_for_kernels_before();
  const uint32_t lane = threadIdx.x % 32;
  const bool is_step = lane < steps.count();
  const uint32_t own = is_step ? __ldcg(&steps.of(lane).doubt.board->heads) : 0;
  if (!__any_sync(kWholeWarp, own != 0)) return;

  DoubtBoard& board = *steps.of(0).doubt.board;  // of all steps' work
  if (threadIdx.x < steps.count()) {
    shared.heads[threadIdx.x] = own;
    shared.splits[threadIdx.x] = doubt_splits<kDim>(steps.of(threadIdx.x), own);
  }
  if (threadIdx.x == 0) shared.ticket = atomicAdd(&board.next, 1U);
  __syncthreads();
  const auto looks = [&](uint32_t i) { return doubt_parts(steps.of(i)) * shared.splits[i]; };
  const auto heads = [&](uint32_t i) { return steps.of(i).group; };
  uint32_t end = 0;  // of the pieces of all phases so far
  // work(piece) for all pieces of a phase, by all thread blocks; ends when all are done.
  const auto share = [&](const auto& each, const auto& work) {
    const uint32_t begin = end;
    for (uint32_t i = 0; i < steps.count(); ++i) end += shared.heads[i] * each(i);
    for (uint32_t ticket = shared.ticket; ticket < end; ticket = shared.ticket) {
      work(DoubtPiece::of(ticket - begin, shared, each));
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
  const auto unit_of = [&](const DoubtPiece& piece, uint32_t part, uint32_t pass) {
    const uint32_t kv_head = __ldcg(&steps.of(piece.step).doubt.list[piece.place]);
    const uint32_t splits = shared.splits[piece.step];
    return DoubtUnit{kv_head, piece.place * splits, part, pass, splits};
  };
  // Where the host reads rows, heads in doubt are counted alone.
  const uint32_t passes = steps.of(0).keys == nullptr ? 0 : kDoubtPasses;
#pragma unroll 1
  for (uint32_t pass = 0; pass < passes; ++pass) {
    share(looks, [&](const DoubtPiece& piece) {
      const uint32_t splits = shared.splits[piece.step];
      const DoubtUnit unit = unit_of(piece, piece.number / splits, pass);
      if (rests(steps.of(piece.step), unit)) return;
      auto& step = *reinterpret_cast<CodesParams*>(shared.step);
      look_again<kDim>(steps.of(piece.step), unit.kv_head, nullptr, step);
      const StepHeads of_part{step, kDoubtHeads * unit.part, 0};
      attend<kDim, kBits, 1>(of_part, DoubtSplit{step, unit, piece.number % splits});
    });
    share(looks, [&](const DoubtPiece& piece) {
      const uint32_t splits = shared.splits[piece.step];
      const DoubtUnit unit = unit_of(piece, piece.number / splits, pass);
      if (rests(steps.of(piece.step), unit)) return;
      read_found(steps.of(piece.step), unit, piece.number % splits,
                 *reinterpret_cast<FoundShared<kDim>*>(memory));
    });
    share(heads, [&](const DoubtPiece& piece) {
      const DoubtUnit unit = unit_of(piece, piece.number / kDoubtHeads, pass);
      if (rests(steps.of(piece.step), unit)) return;
      auto& merge = *reinterpret_cast<MergeShared<kDim>*>(memory);
      if (merge_again(steps.of(piece.step), unit, piece.number, merge)) {
        atomicAdd(&board.again[pass], 1U);
      }
    });
    if (__ldcg(&board.again[pass]) == 0) break;
  }
  __syncthreads();
  if (threadIdx.x == 0) shared.is_last = arrive(&board.left) + 1 == gridDim.x;
  __syncthreads();
  if (!shared.is_last) return;
  for (uint32_t i = 0; i < steps.count(); ++i) clear_board(steps.of(i), shared.heads[i]);
}

template <int kDim, int kBits>
__global__ void __launch_bounds__(kAttendWarps<kDim> * 32, 2)
    settle_kernel(const __grid_constant__ CodesParams s) {
  settle<kDim, kBits>(OneStep{s});
}

template <int kDim, int kBits>
__global__ void __launch_bounds__(kAttendWarps<kDim> * 32, 2)
    settle_batch_kernel(const __grid_constant__ BatchParams batch) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  settle<kDim, kBits>(SeveralSteps{batch});
#endif
}

template <int kDim, int kBits>
SettleKernels settle_kernels() {
  SettleKernels k;
  k.one = reinterpret_cast<const void*>(&settle_kernel<kDim, kBits>);
  if constexpr (kDim == 64 || kDim == 128) {  // that steps of several sessions have
    k.several = reinterpret_cast<const void*>(&settle_batch_kernel<kDim, kBits>);
  }
  k.warps = kAttendWarps<kDim>;
  k.shared = settle_shared<kDim, kBits>();
  return k;
}

template <int kBits>
SettleKernels settle_kernels_for(uint32_t dim) {
  switch (dim) {
    case 64: return settle_kernels<64, kBits>();
    case 80: return settle_kernels<80, kBits>();
    case 96: return settle_kernels<96, kBits>();
    case 128: return settle_kernels<128, kBits>();
    case 256: return settle_kernels<256, kBits>();
    default: return {};
  }
}

}  // namespace keyhole::gpu::codes

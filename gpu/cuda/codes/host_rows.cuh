// How a step asks the host for the rows that it has chosen, and reads them where the host has put them.
//
// A request is a number of words, each of which holds the step's number beside its content. So the host sees when all
// have come, in whatever order, and no fence over the bus is needed before the last. The answer is a flag like all
// others of the host: the rows are read after it.
#pragma once

#include "gpu/cuda/codes/candidates.cuh"
#include "gpu/cuda/codes/params.h"
#include "gpu/cuda/exchange/host_merge.cuh"

namespace keyhole::gpu::codes {

/// Asks for the `found` rows chosen for a KV head, by the thread block of rank 0, and waits until they are there;
/// with none it asks and does not wait. Where they will not come it notes that and makes `top`, the heads' largest
/// logits, NaN, and with them all results. By the whole thread block. Not inlined: that took registers of steps that
/// ask nobody.
__device__ __noinline__ inline void ask_host(const CodesParams& s, uint32_t kv_head,
                                             const uint64_t* chosen, uint32_t found, uint32_t rank,
                                             float* top) {
  const HostRows& host = s.host_rows;
  const uint32_t step = host.steps[kv_head] + 1;
  if (rank == 0) {
    uint64_t* const words = host.requests + size_t{kv_head} * host.request_words;
    const uint64_t upper = uint64_t{step} << 32U;
    for (uint32_t i = threadIdx.x; i <= s.exact_rows; i += blockDim.x) {
      const uint32_t row = i == 0 ? host.layer : i <= found ? row_of(chosen[i - 1]) : kNoRow;
      store_relaxed_system(words + i, upper | row);
    }
  }
  bool failed = false;
  if (found != 0 && threadIdx.x == 0) {
    const Waited waited = wait_for_line(host.answers + kv_head, step, host.waits.timeout_ns);
    failed = waited.failure != FailureKind::none;
    if (failed && host.waits.failure != nullptr) {
      const FailureKind kind = waited.failure == FailureKind::timed_out
                                   ? FailureKind::rows_in_time
                                   : FailureKind::rows_given_up;
      store_relaxed_system(&host.waits.failure->word,
                           failure_word(kind, host.layer, kv_head, step));
    }
    if (rank == 0 && host.waits.sums != nullptr) {
      atomicAdd(reinterpret_cast<unsigned long long*>(&host.waits.sums[kv_head].nanoseconds),
                static_cast<unsigned long long>(waited.nanoseconds));
    }
  }
  if (__syncthreads_or(failed ? 1 : 0) == 0) return;
  if (threadIdx.x < s.group) top[threadIdx.x] = __int_as_float(0x7FFFFFFF);
  __syncthreads();
}

/// Counts the step as one that has asked. Called by one thread block once all thread blocks of the KV head have gone
/// through ask_host().
__device__ inline void count_host_step(const CodesParams& s, uint32_t kv_head) {
  if (s.host_rows.requests != nullptr && threadIdx.x == 0) s.host_rows.steps[kv_head] += 1;
}

/// K of the row in place `number` among those chosen for a KV head; its V lies behind it.
__device__ inline const std::byte* host_row(const CodesParams& s, uint32_t kv_head,
                                            uint32_t number) {
  return s.host_rows.rows + (size_t{kv_head} * s.exact_rows + number) * 2 * s.host_rows.row_bytes;
}

}  // namespace keyhole::gpu::codes

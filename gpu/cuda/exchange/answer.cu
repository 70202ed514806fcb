#include "gpu/cuda/exchange/answer.h"

#include "gpu/cuda/common/check.h"
#include "gpu/cuda/common/element.cuh"
#include "gpu/cuda/common/flags.cuh"
#include "gpu/cuda/common/grid_dependency.cuh"
#include "gpu/cuda/common/launch.h"

namespace keyhole::gpu {
namespace {

constexpr uint32_t kAnswerThreads = 128;

/// A block per KV head.
__global__ void __launch_bounds__(kAnswerThreads)
    hand_over(const __grid_constant__ AnswerParams p) {
  wait_for_kernels_before();
  let_next_kernel_start();
  const uint32_t head = blockIdx.x;
  const uint32_t sequence = p.numbers[head];
  auto* const slot =
      reinterpret_cast<float*>(p.answers + (sequence & 1U) * p.answer_bytes + head * p.slot_bytes);
  const uint32_t quads = p.head_dim / 4;
  for (uint32_t i = threadIdx.x; i < p.group * quads; i += kAnswerThreads) {
    const uint32_t g = i / quads;
    const uint32_t d = (i - g * quads) * 4;
    const size_t q_head = size_t{head} * p.group + g;
    const float4 from = *reinterpret_cast<const float4*>(p.o + q_head * p.head_dim + d);
    reinterpret_cast<float4*>(slot)[i] = from;
    const float x[4] = {from.x, from.y, from.z, from.w};
    store_elements(p.out.data, p.out.dtype, q_head * p.out.head_stride + d, x);
  }
  if (threadIdx.x < p.group) {
    const float lse = p.lse[head * p.group + threadIdx.x];
    slot[p.group * p.head_dim + threadIdx.x] = lse;
    if (p.out_lse != nullptr) p.out_lse[head * p.group + threadIdx.x] = lse;
  }
  __syncthreads();
  if (threadIdx.x == 0) store_release_system(&p.answered[head].sequence, sequence);
}

}  // namespace

void launch_answer(AnswerParams params, uint32_t kv_heads, bool ahead, cudaStream_t stream) {
  void* arguments[] = {&params};
  check(launch_ahead(reinterpret_cast<const void*>(&hand_over), dim3(kv_heads),
                     dim3(kAnswerThreads), 0, stream, arguments, ahead),
        "launching what leaves a step's answer for the host");
}

}  // namespace keyhole::gpu

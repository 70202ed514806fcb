// The second half of a step as a launch of its own.
#include "gpu/cuda/check.h"
#include "gpu/cuda/host_merge.cuh"
#include "gpu/cuda/step_kernel.h"

namespace keyhole::gpu {
namespace {

constexpr uint32_t kMergeThreads = 128;  // 16 bytes each: 4 heads of 128 components in one go

__global__ void __launch_bounds__(kMergeThreads)
    host_merge(const __grid_constant__ MergeParams m, const RingState* state) {
  wait_and_merge(m, blockIdx.x, state->sequence);
}

}  // namespace

void launch_host_merge(const MergeParams& m, const RingState* state, uint32_t kv_heads,
                       cudaStream_t stream) {
  host_merge<<<kv_heads, kMergeThreads, 0, stream>>>(m, state);
  check_launch("launching the merge with the host's state");
}

}  // namespace keyhole::gpu

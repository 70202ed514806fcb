// The second half of a step as a launch of its own.
#include "gpu/cuda/common/check.h"
#include "gpu/cuda/common/grid_dependency.cuh"
#include "gpu/cuda/common/launch.h"
#include "gpu/cuda/exchange/host_merge.cuh"
#include "gpu/cuda/exchange/host_merge.h"

namespace keyhole::gpu {
namespace {

constexpr uint32_t kMergeThreads = 128;  // 16 bytes each: 4 heads of 128 components in one go

__global__ void __launch_bounds__(kMergeThreads)
    host_merge(const __grid_constant__ MergeParams m, const RingState* states) {
  __shared__ bool delivered;
  wait_for_kernels_before();
  const uint32_t head = blockIdx.x;
  const uint32_t sequence = states[head].sequence;
  Waited waited;
  if (threadIdx.x == 0) {
    waited = wait_for_host(m, head, sequence);
    delivered = waited.failure == FailureKind::none;
  }
  __syncthreads();
  let_next_kernel_start();  // not before: it would fill the device while this one waits
  merge_states<true>(m, head, states_of(m, m.resident_o, m.resident_lse, head),
                     delivered ? slot_of(m, head) : HeadStates{});
  if (threadIdx.x == 0) note_wait(m, head, sequence, waited);
}

}  // namespace

void launch_host_merge(MergeParams m, const RingState* states, uint32_t kv_heads, bool ahead,
                       cudaStream_t stream) {
  void* arguments[] = {&m, &states};
  check(launch_ahead(reinterpret_cast<const void*>(&host_merge), dim3(kv_heads),
                     dim3(kMergeThreads), 0, stream, arguments, ahead),
        "launching the merge with the host's state");
}

}  // namespace keyhole::gpu

// The second half of a step as a launch of its own.
#pragma once

#include <cuda_runtime_api.h>

#include "gpu/cuda/exchange/step_params.h"

namespace keyhole::gpu {

/// One block per KV head waits for the host (where m.wait) and merges. states: the layer's, which know the step's
/// number. ahead: as of launch_ahead().
void launch_host_merge(MergeParams m, const RingState* states, uint32_t kv_heads, bool ahead,
                       cudaStream_t stream);

}  // namespace keyhole::gpu

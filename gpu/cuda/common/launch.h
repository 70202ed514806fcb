// Launches a kernel before the kernel ahead of it in the stream has ended (programmatic dependent launch): it is set
// up meanwhile, and its wait_for_kernels_before() takes the place of the stream's own wait.
#pragma once

#include <cuda_runtime_api.h>

namespace keyhole::gpu {

/// Launches `function`. `ahead` false: an ordinary launch, for GPUs older than 9.0. arguments: pointers to the
/// kernel's parameters.
[[nodiscard]] inline cudaError_t launch_ahead(const void* function, dim3 grid, dim3 block,
                                              size_t shared_bytes, cudaStream_t stream,
                                              void** arguments, bool ahead) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = ahead ? 1 : 0;
  return cudaLaunchKernelExC(&config, function, arguments);
}

}  // namespace keyhole::gpu

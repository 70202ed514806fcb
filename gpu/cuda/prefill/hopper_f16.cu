#include "gpu/cuda/prefill/hopper_samples.cuh"

namespace keyhole::gpu {

void launch_hopper_f16(const BlockedParams& params, uint32_t head_dim, cudaStream_t stream) {
  hopper::launch<__half, false>(params, head_dim, stream);
}

void launch_sample_weights_f16(const BlockedParams& piece, const SampledWeights& samples,
                               uint32_t head_dim, cudaStream_t stream) {
  hopper::sample<__half>(piece, samples, head_dim, stream);
}

}  // namespace keyhole::gpu

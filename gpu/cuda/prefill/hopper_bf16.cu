#include "gpu/cuda/prefill/hopper_samples.cuh"

namespace keyhole::gpu {

void launch_hopper_bf16(const BlockedParams& params, uint32_t head_dim, cudaStream_t stream) {
  hopper::launch<__nv_bfloat16, true>(params, head_dim, stream);
}

void launch_sample_weights_bf16(const BlockedParams& piece, const SampledWeights& samples,
                                uint32_t head_dim, cudaStream_t stream) {
  hopper::sample<__nv_bfloat16>(piece, samples, head_dim, stream);
}

}  // namespace keyhole::gpu

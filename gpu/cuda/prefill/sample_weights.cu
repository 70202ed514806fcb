#include "gpu/cuda/prefill/sample_weights.cuh"

namespace keyhole::gpu {

void launch_sample_weights_general(const BlockedParams& piece, const SampledWeights& samples,
                                   DType dtype, uint32_t head_dim, cudaStream_t stream) {
  if (dtype == DType::f16) {
    blocked::sample_of<__half>(piece, samples, head_dim, stream);
  } else {
    blocked::sample_of<__nv_bfloat16>(piece, samples, head_dim, stream);
  }
}

}  // namespace keyhole::gpu

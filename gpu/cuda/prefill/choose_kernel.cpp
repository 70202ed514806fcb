#include "gpu/cuda/prefill/block_choice.h"
#include "gpu/cuda/prefill/blocked_kernels.h"
#include "gpu/cuda/prefill/coded_kernels.h"

namespace keyhole::gpu {

void launch_blocked(const BlockedParams& params, DType dtype, uint32_t head_dim,
                    [[maybe_unused]] bool hopper, cudaStream_t stream) {
  const bool is_half = dtype == DType::f16;
#ifdef KEYHOLE_HOPPER
  if (hopper && head_dim <= kMostHopperDim)
    return is_half ? launch_hopper_f16(params, head_dim, stream)
                   : launch_hopper_bf16(params, head_dim, stream);
#endif
  is_half ? launch_blocked_f16(params, head_dim, stream)
          : launch_blocked_bf16(params, head_dim, stream);
}

void launch_coded_attend(const CodedParams& params, [[maybe_unused]] bool hopper,
                         cudaStream_t stream) {
  const bool of_2_bits = params.rows.code.key_bits == 2;
#ifdef KEYHOLE_HOPPER
  if (hopper) {
    return of_2_bits ? launch_coded_attend_2(params, stream)
                     : launch_coded_attend_4(params, stream);
  }
#endif
  of_2_bits ? launch_coded_general_2(params, stream) : launch_coded_general_4(params, stream);
}

void launch_sample_weights(const BlockedParams& piece, const SampledWeights& samples, DType dtype,
                           uint32_t head_dim, [[maybe_unused]] bool hopper, cudaStream_t stream) {
#ifdef KEYHOLE_HOPPER
  if (hopper) {
    return dtype == DType::f16 ? launch_sample_weights_f16(piece, samples, head_dim, stream)
                               : launch_sample_weights_bf16(piece, samples, head_dim, stream);
  }
#endif
  launch_sample_weights_general(piece, samples, dtype, head_dim, stream);
}

}  // namespace keyhole::gpu

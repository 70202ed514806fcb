#include "gpu/cuda/prefill/coded_attend.cuh"

namespace keyhole::gpu {

void launch_coded_attend_4(const CodedParams& params, cudaStream_t stream) {
  coded::launch_pass<coded::HopperPass<4>>(params, stream);
}

}  // namespace keyhole::gpu

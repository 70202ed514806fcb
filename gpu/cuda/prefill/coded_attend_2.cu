#include "gpu/cuda/prefill/coded_attend.cuh"

namespace keyhole::gpu {

void launch_coded_attend_2(const CodedParams& params, cudaStream_t stream) {
  coded::launch_pass<coded::HopperPass<2>>(params, stream);
}

}  // namespace keyhole::gpu

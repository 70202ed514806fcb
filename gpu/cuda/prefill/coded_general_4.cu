#include "gpu/cuda/prefill/coded_general.cuh"

namespace keyhole::gpu {

void launch_coded_general_4(const CodedParams& params, cudaStream_t stream) {
  coded::launch_pass<coded::GeneralPass<4>>(params, stream);
}

}  // namespace keyhole::gpu

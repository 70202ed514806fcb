#include "gpu/cuda/prefill/coded_general.cuh"

namespace keyhole::gpu {

void launch_coded_general_2(const CodedParams& params, cudaStream_t stream) {
  coded::launch_pass<coded::GeneralPass<2>>(params, stream);
}

}  // namespace keyhole::gpu

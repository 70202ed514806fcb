#include "gpu/cuda/indexing/neighbour_search.cuh"

namespace keyhole::gpu {

cudaError_t launch_search_bf16(const TileArgs& args, cudaStream_t stream) {
  return launch_dim<__nv_bfloat16>(args, stream);
}

}  // namespace keyhole::gpu

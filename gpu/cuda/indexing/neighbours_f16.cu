#include "gpu/cuda/indexing/neighbour_search.cuh"

namespace keyhole::gpu {

cudaError_t launch_search_f16(const TileArgs& args, cudaStream_t stream) {
  return launch_dim<__half>(args, stream);
}

}  // namespace keyhole::gpu

#include "gpu/cuda/codes/settle.cuh"

namespace keyhole::gpu::codes {

SettleKernels settle_kernels_of_2_bits(uint32_t dim) { return settle_kernels_for<2>(dim); }

}  // namespace keyhole::gpu::codes

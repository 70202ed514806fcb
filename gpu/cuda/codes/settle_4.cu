#include "gpu/cuda/codes/settle.cuh"

namespace keyhole::gpu::codes {

SettleKernels settle_kernels_of_4_bits(uint32_t dim) { return settle_kernels_for<4>(dim); }

}  // namespace keyhole::gpu::codes

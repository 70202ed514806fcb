#include "gpu/cuda/codes/settle.cuh"

namespace keyhole::gpu::codes {

SettleKernel settle_kernel_of_2_bits(uint32_t dim) { return settle_kernel_for<2>(dim); }

}  // namespace keyhole::gpu::codes

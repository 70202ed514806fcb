#include "gpu/cuda/codes/settle.cuh"

namespace keyhole::gpu::codes {

SettleKernel settle_kernel_of_4_bits(uint32_t dim) { return settle_kernel_for<4>(dim); }

}  // namespace keyhole::gpu::codes

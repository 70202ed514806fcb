// Resident attention over f16 K and V.
#include "gpu/cuda/rings/share_half.cuh"
#include "gpu/cuda/rings/step.cuh"

namespace keyhole::gpu {
namespace {

template <int D>
StepKernel of_dim(uint32_t group) {
  using T = __half;
  return group <= 8 ? step_kernel_of<T, D, HalfShare<T, D, 1>>()
                    : step_kernel_of<T, D, HalfShare<T, D, 2>>();
}

}  // namespace

StepKernel step_kernel_f16(uint32_t head_dim, uint32_t group) {
  switch (head_dim) {
    case 64: return of_dim<64>(group);
    case 80: return of_dim<80>(group);
    case 96: return of_dim<96>(group);
    case 128: return of_dim<128>(group);
    case 256: return of_dim<256>(group);
    case 512: return of_dim<512>(group);
    default: return {};
  }
}

}  // namespace keyhole::gpu

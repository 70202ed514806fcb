// Resident attention over bf16 K and V.
#include "gpu/cuda/rings/share_half.cuh"
#include "gpu/cuda/rings/step.cuh"

namespace keyhole::gpu {
namespace {

template <int D>
StepKernel of_dim(uint32_t group, size_t most) {
  using T = __nv_bfloat16;
  const StepKernel kernel = group <= 8 ? step_kernel_of<T, D, HalfShare<T, D, 1>>()
                                       : step_kernel_of<T, D, HalfShare<T, D, 2>>();
  if constexpr (D > 256) {
    if (!kernel.fits(most)) {
      return group <= 8 ? step_kernel_of<T, D, HalfShare<T, D, 1, 2>>()
                        : step_kernel_of<T, D, HalfShare<T, D, 2, 1>>();
    }
  }
  return kernel;
}

}  // namespace

StepKernel step_kernel_bf16(uint32_t head_dim, uint32_t group, size_t most) {
  switch (head_dim) {
    case 64: return of_dim<64>(group, most);
    case 80: return of_dim<80>(group, most);
    case 96: return of_dim<96>(group, most);
    case 128: return of_dim<128>(group, most);
    case 256: return of_dim<256>(group, most);
    case 512: return of_dim<512>(group, most);
    default: return {};
  }
}

}  // namespace keyhole::gpu

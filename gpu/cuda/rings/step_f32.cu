// Resident attention over fp32 K and V.
#include "gpu/cuda/rings/share_float.cuh"
#include "gpu/cuda/rings/step.cuh"

namespace keyhole::gpu {
namespace {

template <int D>
StepKernel of_dim(uint32_t group, size_t most) {
  if (group == 1) return step_kernel_of<float, D, FloatShare<D, 1>>();
  if (group <= 4) return step_kernel_of<float, D, FloatShare<D, 4>>();
  const StepKernel kernel = step_kernel_of<float, D, FloatShare<D, 16>>();
  if constexpr (D > 256) {
    if (!kernel.fits(most)) return step_kernel_of<float, D, FloatShare<D, 16, 1>>();
  }
  return kernel;
}

}  // namespace

StepKernel step_kernel_f32(uint32_t head_dim, uint32_t group, size_t most) {
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

// Resident attention over fp32 K and V.
#include "gpu/cuda/rings/share_float.cuh"
#include "gpu/cuda/rings/step.cuh"

namespace keyhole::gpu {
namespace {

template <int D>
StepKernel of_dim(uint32_t group) {
  if (group == 1) return step_kernel_of<float, D, FloatShare<D, 1>>();
  if (group <= 4) return step_kernel_of<float, D, FloatShare<D, 4>>();
  return step_kernel_of<float, D, FloatShare<D, 16>>();
}

}  // namespace

StepKernel step_kernel_f32(uint32_t head_dim, uint32_t group) {
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

// Rows of 512 components: the pass is that for many query rows alone (gpu/cuda/codes/wide_512.cu), as no warp has
// registers for all components of a tile.
#include "gpu/cuda/codes/finish_parts.cuh"
#include "gpu/cuda/codes/finish_single.cuh"

namespace keyhole::gpu::codes {
namespace {

template <int kBits, int kHeadTiles>
Kernels kernels() {
  constexpr int kDim = 512;
  Kernels k;
  k.finish_parts = reinterpret_cast<const void*>(&finish_parts_kernel<kDim, kBits, kHeadTiles>);
  k.finish_shared = sizeof(FinishShared<kDim, kBits, kHeadTiles>);
  k.settle_shared = settle_shared<kDim, kBits>();
  k.finish_single_parts =
      reinterpret_cast<const void*>(&finish_single_parts_kernel<kDim, kBits, kHeadTiles>);
  k.single_shared = sizeof(SingleShared<kDim, kBits, kHeadTiles>);
  k.heads = 4 * kHeadTiles;
  return k;
}

}  // namespace

Kernels kernels_of_512(uint32_t bits, uint32_t group) {
  switch (bits) {
    case 2: return group <= 8 ? kernels<2, 2>() : kernels<2, 4>();
    case 4: return group <= 8 ? kernels<4, 2>() : kernels<4, 4>();
    default: return {};
  }
}

}  // namespace keyhole::gpu::codes

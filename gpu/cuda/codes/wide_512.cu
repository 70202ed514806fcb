// The pass for rows of 512 components, of one token, too. What follows it: gpu/cuda/codes/instances_512.cu.
#include "gpu/cuda/codes/wide_pass.cuh"

namespace keyhole::gpu::codes {
namespace {

template <int kBits>
WideKernels of_rows(uint32_t rows) {
  constexpr int kDim = 512;
  if (rows <= 8) return wide_pass<kDim, kBits, 1>();
  if (rows <= 16) return wide_pass<kDim, kBits, 2>();
  if (rows <= 24) return wide_pass<kDim, kBits, 3>();
  if (rows <= 32) return wide_pass<kDim, kBits, 4>();
  return {};  // there are no registers for more sums
}

}  // namespace

WideKernels wide_kernels_of_512(uint32_t bits, uint32_t rows) {
  switch (bits) {
    case 2: return of_rows<2>(rows);
    case 4: return of_rows<4>(rows);
    default: return {};
  }
}

}  // namespace keyhole::gpu::codes

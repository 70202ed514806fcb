#include "gpu/cuda/codes/warpgroup_kernels.h"

#include "gpu/cuda/common/check.h"
#include "gpu/cuda/common/kernel_generation.h"

namespace keyhole::gpu::codes {

bool warpgroups_run_here() {
  int ordinal = 0;
  check(cudaGetDevice(&ordinal), "the current device");
  return hopper_kernels_run_on(ordinal);
}

WideKernels group_kernels_of([[maybe_unused]] const CodeShape& shape,
                             [[maybe_unused]] uint32_t rows) {
#ifdef KEYHOLE_HOPPER
  // Of 9 to 16 rows of 128 components the pass for few rows takes 0.93 to 0.95 of the time, of 256 components 1.18 to
  // 1.45 times it.
  const uint32_t fewer = shape.dim > 128 ? 8 : kMaxDeviceGroup;
  if (rows <= fewer || shape.key_bits != shape.value_bits) return {};
  switch (shape.dim) {
    case 64: return group_kernels_of_64(shape.key_bits, rows);
    case 128: return group_kernels_of_128(shape.key_bits, rows);
    case 256: return group_kernels_of_256(shape.key_bits, rows);
    default: return {};
  }
#else
  return {};
#endif
}

}  // namespace keyhole::gpu::codes

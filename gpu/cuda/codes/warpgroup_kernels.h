// Which steps of many query rows are attended by Hopper's warpgroup products (gpu/cuda/codes/warpgroup.cuh).
#pragma once

#include "gpu/cuda/codes/wide_params.h"

namespace keyhole::gpu::codes {

/// Whether kernels of 9.0a were compiled and run on the current device. Throws as kernels_have_clusters().
[[nodiscard]] bool warpgroups_run_here();

/// What such a pass has in place of the one of all devices; without a kernel where there is none: other dimensions than
/// 64, 128 and 256, fewer than 17 or more than 48 rows, or a build without 9.0a.
[[nodiscard]] WideKernels group_kernels_of(const CodeShape& shape, uint32_t rows);

}  // namespace keyhole::gpu::codes

// The merge of attention states that lie in device memory, for engines with attention kernels of their own.
#pragma once

#include <cstdint>

#include "cpu/types.h"
#include "gpu/step.h"

namespace keyhole::gpu {

/// States that one merge takes at most: their pointers are kernel parameters, of which there are 32 KB.
inline constexpr uint32_t kMostMergedStates = 2000;

struct StateMerge {
  const void* const* o =
      nullptr;  ///< `[count]` host pointers to `[rows, dim]` of `dtype` in device memory
  const float* const* lse = nullptr;  ///< `[count]` host pointers to `[rows]` in device memory
  uint32_t count = 0;                 ///< up to kMostMergedStates
  uint32_t rows = 0;                  ///< 1 or more: each is merged by itself
  uint32_t dim = 0;                   ///< 1 or more
  DType dtype = DType::f32;
  bool base2 = false;  ///< lse and out_lse are log2 of the sums, not ln
  void* out =
      nullptr;  ///< `[rows, dim]` of `out_dtype`; may be one of o where the dtypes are equal
  DType out_dtype = DType::f32;
  float* out_lse = nullptr;  ///< `[rows]`; may be one of lse
};

/// Enqueues lse = log sum_i b^lse_i and o = sum_i b^(lse_i - lse) o_i for every row, on the current device. Empty
/// states (lse = -inf) are not read and change nothing; none but those give (0, -inf); a NaN in a lse gives NaN.
/// Allocates nothing and waits for nothing. Throws Error(unsupported) where there is no CUDA or no device,
/// Error(device_error) where the launch fails.
void merge_states(const StateMerge& merge, Stream stream);

}  // namespace keyhole::gpu

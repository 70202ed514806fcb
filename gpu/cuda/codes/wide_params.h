// Parameters of the pass for many query rows (gpu/cuda/codes/wide.cuh), and of what follows it.
#pragma once

#include <algorithm>

#include "gpu/cuda/codes/params.h"

namespace keyhole::gpu::codes {

/// A step of several tokens, and its parts: each has the heads of some of the tokens, 16 at most, and is chosen for,
/// read for and merged like a step of its own. All parts have the same tokens but the last, which may have fewer.
struct WideParams {
  CodesParams step;  ///< the whole step: only q, resident tokens and where the codes lie count
  CodesParams parts[kMostStepParts];
  uint32_t count = 0;  ///< number of parts

  /// The part that a row of the step's group belongs to, and its number there.
  struct Place {
    uint32_t part, row;
  };
  KEYHOLE_HOST_DEVICE Place place(uint32_t row) const {
    const uint32_t rows = parts[0].group, part = row / rows;
    return {part, row - part * rows};
  }
};
// CUDA 12.1 or newer takes as much as a parameter on GPUs of compute capability 7.0 or newer.
static_assert(sizeof(WideParams) <= 32764);

inline constexpr uint32_t kWideWarps = 8;   ///< of a thread block of the pass
inline constexpr uint32_t kWideRows = 128;  ///< rows of codes that it takes at once: half a block

/// Number of places for means of a pass with so many stages: those of two chunks are in use while those of a third are
/// on their way.
KEYHOLE_HOST_DEVICE constexpr uint32_t mean_places(uint32_t stages) {
  return stages < 2 ? 3 : stages + 1;
}

/// The kernels of one shape, for so many query rows.
struct WideKernels {
  const void* attend = nullptr;  ///< null: there is none
  uint32_t rows = 0;        ///< query rows of a thread block; more take several passes (blockIdx.z)
  int occupancy = 1;        ///< thread blocks that a multiprocessor has registers for
  size_t fixed = 0;         ///< bytes of shared memory that the pass takes beside its stages,
  size_t shared = 0;        ///< at least so many bytes for these,
  size_t stage = 0;         ///< bytes of a piece of codes: a chunk, or the larger half of one
  size_t mean = 0;          ///< and of a block's means
  bool has_halves = false;  ///< WideShape::kHalves
  uint32_t threads = kWideWarps * 32;  ///< of a thread block of the pass
  /// Of the pass by warpgroups bytes of the last stage, which has the resident tokens first; `fixed` has the means.
  size_t last = 0;

  /// Bytes of the pass's shared memory: as many pieces as CodesStep::stages, of halves one more, and means.
  [[nodiscard]] size_t bytes(int stages) const {
    const auto n = static_cast<uint32_t>(stages);
    if (last != 0) return fixed + std::max(shared, (n - 1) * stage + last);
    return fixed + std::max(shared, (has_halves ? n + 1 : n) * stage + mean_places(n) * mean);
  }
  /// The fewest stages that the pass works with.
  [[nodiscard]] int least_stages() const { return has_halves ? 1 : kLeastStages; }
  /// The number of stages to begin with where a thread block may have `most` bytes: kLeastStages, or where these do not
  /// fit fewer.
  [[nodiscard]] int first_stages(size_t most) const {
    return bytes(kLeastStages) <= most ? kLeastStages : least_stages();
  }
  [[nodiscard]] bool fits(size_t most) const { return bytes(least_stages()) <= most; }
};

/// Each function has its file, so that compilers run side by side.
[[nodiscard]] WideKernels wide_kernels_of_64(uint32_t bits, uint32_t rows);
[[nodiscard]] WideKernels wide_kernels_of_80(uint32_t bits, uint32_t rows);
[[nodiscard]] WideKernels wide_kernels_of_96(uint32_t bits, uint32_t rows);
[[nodiscard]] WideKernels wide_kernels_of_128(uint32_t bits, uint32_t rows);
[[nodiscard]] WideKernels wide_kernels_of_256(uint32_t bits, uint32_t rows);
[[nodiscard]] WideKernels wide_kernels_of_512(uint32_t bits, uint32_t rows);  ///< up to 32 rows
/// Up to 24 rows of 256 components in 4 bits, keys and values of a chunk one after the other, for 99 KiB of shared
/// memory.
[[nodiscard]] WideKernels small_wide_kernels_of_256(uint32_t rows);

/// Of the pass by warpgroups (gpu/cuda/codes/warpgroup.cuh): what belongs to its kernel alone; null: there is none.
[[nodiscard]] WideKernels group_kernels_of_64(uint32_t bits, uint32_t rows);
[[nodiscard]] WideKernels group_kernels_of_128(uint32_t bits, uint32_t rows);
[[nodiscard]] WideKernels group_kernels_of_256(uint32_t bits, uint32_t rows);

}  // namespace keyhole::gpu::codes

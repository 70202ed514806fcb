// The query heads that a launch works for. Heads that attend by different patterns have launches of their own, each
// over the grid of all heads; thread blocks of other heads end at once.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace keyhole::gpu {

struct HeadSet {
  static constexpr uint32_t kMost = 512;  ///< heads, where not all are in
  bool is_all = true;
  uint64_t bits[kMost / 64] = {};

  void add(uint32_t head) {
    is_all = false;
    bits[head / 64] |= uint64_t{1} << head % 64;
  }
  [[nodiscard]] __host__ __device__ bool has(uint32_t head) const {
    return is_all || (bits[head / 64] >> head % 64 & 1U) != 0;
  }
};

}  // namespace keyhole::gpu

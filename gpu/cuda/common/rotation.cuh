// The rotation of rows that codes are of (cpu/code_layout.h), of a row in shared memory.
#pragma once

#include <cstdint>

#include "cpu/code_layout.h"

namespace keyhole::gpu {

/// Rotates a row in shared memory, or back; by one warp.
__device__ inline void rotate_in_shared(float* row, uint32_t dim, bool back) {
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t passes = hadamard_passes(dim);
  for (uint32_t i = 0; i < passes; ++i) {
    const uint32_t number = back ? passes - 1 - i : i;
    const HadamardPass pass = hadamard_pass(dim, number);
    float* x = row + pass.begin;
    if (!back) {
      for (uint32_t j = lane; j < pass.size; j += 32) x[j] *= code_sign(number, j);
      __syncwarp();
    }
    for (uint32_t step = 1; step < pass.size; step *= 2) {
      for (uint32_t p = lane; p < pass.size / 2; p += 32) {
        const uint32_t at = 2 * p - (p & (step - 1));  // p / step * 2 step + p % step
        const float a = x[at], b = x[at + step];
        x[at] = a + b;
        x[at + step] = a - b;
      }
      __syncwarp();
    }
    const float norm = 1.0F / sqrtf(static_cast<float>(pass.size));
    for (uint32_t j = lane; j < pass.size; j += 32) {
      x[j] *= back ? norm * code_sign(number, j) : norm;
    }
    __syncwarp();
  }
}

}  // namespace keyhole::gpu

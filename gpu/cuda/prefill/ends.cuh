// What the kernels of blocked attention share beside their products: sums over a row, which rows a query sees, and what they write at
// the end.
#pragma once

#include "gpu/cuda/common/element.cuh"
#include "gpu/cuda/common/state.cuh"
#include "gpu/cuda/prefill/blocked_kernels.h"

namespace keyhole::gpu::blocked {

/// Over the four lanes of a row of a product's result.
__device__ inline float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(kWholeWarp, x, 1));
  return fmaxf(x, __shfl_xor_sync(kWholeWarp, x, 2));
}
__device__ inline float quad_sum(float x) {
  x += __shfl_xor_sync(kWholeWarp, x, 1);
  return x + __shfl_xor_sync(kWholeWarp, x, 2);
}
/// 2^x, one instruction; what is too small for a normal number is 0.
__device__ inline float power_of_2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// Rows [from, to) of a piece that query `row` sees.
struct Seen {
  uint32_t from, to;

  __device__ static Seen by(const BlockedParams& a, uint32_t row) {
    if (!a.causal) return {0, a.rows};
    const uint32_t end = a.first + row + 1;
    return {a.window != 0 && end > a.window ? end - a.window : 0, min(a.rows, end)};
  }
};

/// Bits of the rows that a tile of queries attends (BlockedParams::chosen); null: there are none.
__device__ inline const uint32_t* chosen_rows(const BlockedParams& a, uint32_t head,
                                              uint32_t tile) {
  if (a.chosen == nullptr) return nullptr;
  const uint32_t tiles = (a.n + kListQueries - 1) / kListQueries;
  return a.chosen + (size_t{head} * tiles + tile) * (a.rows / 32);
}

/// Octaves under the largest weight, of which lighter blocks are passed over; 0: none are.
__device__ inline float skip_of(const BlockedParams& a, uint32_t head) {
  return a.skips != nullptr ? a.skips[head] : a.skip;
}
/// Whether a block must be attended whose largest logit is `largest`, all in base 2; before: the largest of those before. The sum
/// is on the block's side so that the heaviest block is attended whatever is rounded, and so are NaN.
__device__ inline bool has_weight(float largest, float before, float limit) {
  return !(largest + limit < before);
}

/// What becomes of a query's sums: its output is `scale` times them.
struct QueryEnd {
  float scale, lse;

  /// top, total: as BlockedParams::sums has them, sums of all lanes; unit: what makes a logit of `top`. sinks: learned, natural
  /// log; null: none.
  __device__ static QueryEnd of(float unit, const float* sinks, uint32_t head, float top,
                                float total) {
    float logit = unit * top, keep = 1.0F;
    if (sinks != nullptr && sinks[head] > kMinusInf) {
      // The state (0, sink).
      const float largest = fmaxf(logit, sinks[head]);
      keep = expf(logit - largest);
      total = total * keep + expf(sinks[head] - largest);
      logit = largest;
    }
    return {total > 0.0F ? keep / total : 0.0F, logit + logf(total)};
  }
  __device__ static QueryEnd of(const BlockedParams& a, uint32_t head, float top, float total) {
    return of(a.logits.softcap > 0.0F ? 1.0F : a.logits.scale, a.final.sinks, head, top, total);
  }
};

/// Two neighbouring elements of an output whose rows are aligned to 8 bytes.
__device__ inline void store_pair(const BlockedOutput& out, size_t at, float x, float y) {
  switch (out.dtype) {
    case DType::f16:
      *reinterpret_cast<__half2*>(static_cast<__half*>(out.data) + at) = __floats2half2_rn(x, y);
      break;
    case DType::bf16:
      *reinterpret_cast<__nv_bfloat162*>(static_cast<__nv_bfloat16*>(out.data) + at) =
          __floats2bfloat162_rn(x, y);
      break;
    default: *reinterpret_cast<float2*>(static_cast<float*>(out.data) + at) = make_float2(x, y);
  }
}

}  // namespace keyhole::gpu::blocked

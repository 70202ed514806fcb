// What the kernels of blocked attention share beside their products: sums over a row, the rows that a query sees, and
// how outputs are written.
#pragma once

#include "gpu/cuda/common/element.cuh"
#include "gpu/cuda/common/state.cuh"
#include "gpu/cuda/prefill/blocked_kernels.h"

namespace keyhole::gpu::blocked {

/// Maximum, and sum, over the four lanes that have a row of a product's result.
__device__ inline float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(kWholeWarp, x, 1));
  return fmaxf(x, __shfl_xor_sync(kWholeWarp, x, 2));
}
__device__ inline float quad_sum(float x) {
  x += __shfl_xor_sync(kWholeWarp, x, 1);
  return x + __shfl_xor_sync(kWholeWarp, x, 2);
}
/// 2^x in one instruction; results too small for a normal number are 0.
__device__ inline float power_of_2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// The rows [from, to) of a piece that query `row` sees.
struct Seen {
  uint32_t from, to;

  __device__ static Seen by(const BlockedParams& a, uint32_t row) {
    if (!a.causal) return {0, a.rows};
    const uint32_t end = a.first + row + 1;
    return {a.window != 0 && end > a.window ? end - a.window : 0, min(a.rows, end)};
  }
};

/// The bits of the rows that a tile of queries attends (BlockedParams::chosen); null: there are none.
__device__ inline const uint32_t* chosen_rows(const BlockedParams& a, uint32_t head,
                                              uint32_t tile) {
  if (a.chosen == nullptr) return nullptr;
  const uint32_t tiles = (a.n + kListQueries - 1) / kListQueries;
  return a.chosen + (size_t{head} * tiles + tile) * (a.rows / 32);
}

/// The skip limit of a head: blocks lighter than the largest weight by this many octaves are passed over; 0: none
/// are.
__device__ inline float skip_of(const BlockedParams& a, uint32_t head) {
  return a.skips != nullptr ? a.skips[head] : a.skip;
}
/// Whether a block must be attended whose largest logit is `largest`, in base 2. before: the largest logit of earlier
/// blocks. The limit is added on the block's side, so that rounding cannot drop the heaviest block, and NaN is
/// attended.
__device__ inline bool has_weight(float largest, float before, float limit) {
  return !(largest + limit < before);
}

/// How a query's sums become its output: they are multiplied by `scale`.
struct QueryEnd {
  float scale, lse;

  /// top, total: as in BlockedParams::sums, summed over all lanes; unit: the factor that makes a logit of `top`.
  /// sinks: learned, natural log; null: none.
  __device__ static QueryEnd of(float unit, const float* sinks, uint32_t head, float top,
                                float total) {
    float logit = unit * top, keep = 1.0F;
    if (sinks != nullptr && sinks[head] > kMinusInf) {
      // Merges with the learned sink, the state (0, sink).
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

// What the kernels of blocked attention share beside their products: which rows a query sees, and what they write at the end.
#pragma once

#include "gpu/cuda/blocked/blocked_kernels.h"
#include "gpu/cuda/common/element.cuh"
#include "gpu/cuda/common/state.cuh"

namespace keyhole::gpu::blocked {

/// Rows [from, to) of a piece that query `row` sees.
struct Seen {
  uint32_t from, to;

  __device__ static Seen by(const BlockedParams& a, uint32_t row) {
    if (!a.causal) return {0, a.rows};
    const uint32_t end = a.first + row + 1;
    return {a.window != 0 && end > a.window ? end - a.window : 0, min(a.rows, end)};
  }
};

/// What becomes of a query's sums: its output is `scale` times them.
struct QueryEnd {
  float scale, lse;

  /// top, total: as BlockedParams::sums has them, sums of all lanes.
  __device__ static QueryEnd of(const BlockedParams& a, uint32_t head, float top, float total) {
    float logit = (a.logits.softcap > 0.0F ? 1.0F : a.logits.scale) * top, keep = 1.0F;
    const float sink = a.final.sinks == nullptr ? kMinusInf : a.final.sinks[head];
    if (sink > kMinusInf) {
      // The state (0, sink).
      const float largest = fmaxf(logit, sink);
      keep = expf(logit - largest);
      total = total * keep + expf(sink - largest);
      logit = largest;
    }
    return {total > 0.0F ? keep / total : 0.0F, logit + logf(total)};
  }
};

/// Two neighbouring elements of an output whose rows are aligned to 8 bytes.
__device__ inline void store_pair(const BlockedOutput& out, size_t at, float x, float y) {
  switch (out.dtype) {
    case DType::f16: *reinterpret_cast<__half2*>(static_cast<__half*>(out.data) + at) = __floats2half2_rn(x, y); break;
    case DType::bf16:
      *reinterpret_cast<__nv_bfloat162*>(static_cast<__nv_bfloat16*>(out.data) + at) = __floats2bfloat162_rn(x, y);
      break;
    default: *reinterpret_cast<float2*>(static_cast<float*>(out.data) + at) = make_float2(x, y);
  }
}

}  // namespace keyhole::gpu::blocked

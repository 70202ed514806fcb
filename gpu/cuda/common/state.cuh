// Attention states, and how they merge: the one place where softmax is rescaled.
//
// A set of tokens with values v_i and logits x_i, in units of ln 2 (natural logits times log2 e), has
//
//   m  = max x_i                     the largest logit
//   d  = sum 2^(x_i - m)             the denominator, 1 or more
//   o~ = sum 2^(x_i - m) v_i         the numerator, wherever a kernel keeps it
//
// and its attention state is o = o~ / d, lse = ln 2 (m + log2 d). The empty set: m = -inf, d = 0, o~ = 0; o = 0,
// lse = -inf.
// Inside kernels the base is 2, as exp2f() is one instruction and expf() is that and a product. What kernels hand out
// (o, lse) is in natural log.
#pragma once

#include <cstdint>

#include "cpu/types.h"
#include "gpu/cuda/common/warp.cuh"

namespace keyhole::gpu {

inline constexpr float kLog2E = 1.4426950408889634F;
inline constexpr float kLn2 = 0.6931471805599453F;

/// What is subtracted from logits before they are exponentiated: m, but 0 for an empty set, as -inf - (-inf) is NaN.
/// Every weight of an empty set is then 2^-inf = 0.
__device__ inline float finite_base(float m) { return m == kMinusInf ? 0.0F : m; }

/// The numbers m and d of a set. It has no default values, so that it can lie in shared memory; empty() is the set
/// without tokens.
struct alignas(8) AttentionState {
  float m;  ///< max x_i
  float d;  ///< sum 2^(x_i - m)

  __device__ static AttentionState empty() { return {kMinusInf, 0.0F}; }
  /// Reads a state from L2, because other blocks of the grid wrote it and L1 does not know.
  __device__ static AttentionState from_l2(const AttentionState* at) {
    const float2 x = __ldcg(reinterpret_cast<const float2*>(at));
    return {x.x, x.y};
  }

  /// 2^(x - m): the weight of a logit x, or of another set's m, relative to this set.
  __device__ float weight(float x) const { return exp2f(x - finite_base(m)); }

  /// Makes `higher` (>= m) the new m and returns 2^(old m - m). d and o~ are the caller's to multiply by it.
  __device__ float raise(float higher) {
    const float before = m;
    m = higher;
    return weight(before);
  }

  /// Merges another set in: m = max(m, o.m), d = d 2^(m_old - m) + o.d 2^(o.m - m). An empty set changes nothing; a
  /// set whose logits are NaN (which m passes over, but not d) makes d NaN.
  __device__ void merge(AttentionState o) {
    if (o.m > m) {
      d *= exp2f(m - o.m);
      m = o.m;
    }
    if (o.d != 0.0F) d += o.d * exp2f(o.m - m);
  }

  /// 1 / d, the factor that makes o of o~; 0 for the empty set, whose o is 0.
  __device__ float inverse() const { return d == 0.0F ? 0.0F : 1.0F / d; }
  /// m + log2 d, the logarithm to base 2 of the sum of weights. -inf unless d > 0, so for a NaN, too.
  __device__ float log2_sum() const { return d > 0.0F ? m + log2f(d) : kMinusInf; }
  /// ln 2 (m + log2 d), the natural logarithm of the sum of weights; -inf for the empty set, as log2f(0) = -inf.
  __device__ float lse() const { return kLn2 * (finite_base(m) + log2f(d)); }
};
static_assert(sizeof(AttentionState) == 8);

/// e^(lse - base): the weight of a finished state (o, lse), natural log. base: finite_base() of the largest lse.
__device__ inline float natural_weight(float lse, float base) {
  return exp2f((lse - base) * kLog2E);
}

}  // namespace keyhole::gpu

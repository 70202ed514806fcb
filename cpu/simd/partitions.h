// Kernels for partitions of keys that stand for their members: weights by mean keys, and weighted sums of rows.
#pragma once

#include "cpu/simd/attend.h"

namespace keyhole::cpu {
namespace {

template <class S>
struct PartitionWeights {
  typename S::F weights, uncertainties;
};

/// Weighs kWidth partitions for head h.
template <class S>
[[gnu::always_inline]] inline PartitionWeights<S> weigh_lanes(const PartitionArgs& a, uint32_t h,
                                                              typename S::F score,
                                                              typename S::F size,
                                                              typename S::F variance) {
  using F = typename S::F;
  const F one = S::set1(1.0F);
  F mean = S::mul(score, S::set1(a.logits.scale));
  F slope = S::set1(a.logits.scale);  // derivative of the logit by the score
  if (a.logits.softcap > 0.0F) {
    const F cap = S::set1(a.logits.softcap);
    const F share = tanh<S>(S::div(mean, cap));
    mean = S::mul(cap, share);
    slope = S::mul(slope, S::fnma(share, share, one));
  }
  const F t = S::mul(S::mul(S::mul(slope, slope), S::set1(a.square_norms[h])), variance);
  // min() and max() in this order give the cap for NaN.
  F expected = S::min(S::fma(t, S::set1(0.5F), mean), S::set1(a.caps[h]));
  if (a.margins != nullptr) {
    expected = S::max(S::sub(mean, S::set1(a.margins[h])), expected);
  }
  const F below = S::min(S::sub(expected, S::set1(a.shifts[h])), S::zero());
  const F weight = S::mul(size, softmax_weight<S>(below));
  const F spread = S::sub(exp<S>(S::min(t, S::set1(2.0F))), one);
  return {weight, S::div(S::mul(S::mul(weight, weight), spread), S::max(size, one))};
}

template <class S>
void weigh_partitions(const PartitionArgs& a) {
  using F = typename S::F;
  const size_t whole = a.count / S::kWidth * S::kWidth;
  const size_t left = a.count - whole;
  float sizes[S::kWidth] = {};
  float variances[S::kWidth] = {};
  __builtin_memcpy(sizes, a.sizes + whole, left * sizeof(float));
  if (a.variances != nullptr) {
    __builtin_memcpy(variances, a.variances + whole, left * sizeof(float));
  }
  for (uint32_t h = 0; h < a.group; ++h) {
    const float* scores = a.scores + h * a.score_stride;
    float* weights = a.weights + h * a.out_stride;
    float* uncertainties =
        a.uncertainties != nullptr ? a.uncertainties + h * a.out_stride : nullptr;
    for (size_t i = 0; i < whole; i += S::kWidth) {
      const F variance = a.variances != nullptr ? S::load_f32(a.variances + i) : S::zero();
      const auto w =
          weigh_lanes<S>(a, h, S::load_f32(scores + i), S::load_f32(a.sizes + i), variance);
      S::store_f32(weights + i, w.weights);
      if (uncertainties != nullptr) S::store_f32(uncertainties + i, w.uncertainties);
    }
    if (left == 0) continue;
    float last[S::kWidth] = {};
    __builtin_memcpy(last, scores + whole, left * sizeof(float));
    const auto w =
        weigh_lanes<S>(a, h, S::load_f32(last), S::load_f32(sizes), S::load_f32(variances));
    S::store_f32(last, w.weights);
    __builtin_memcpy(weights + whole, last, left * sizeof(float));
    if (uncertainties == nullptr) continue;
    S::store_f32(last, w.uncertainties);
    __builtin_memcpy(uncertainties + whole, last, left * sizeof(float));
  }
}

template <class S, DType T>
void weighted_sum(const WeightedSumArgs& a) {
  if (a.count == 0) return;
  const uint32_t dim = a.values.dim;
  RowBlocks values(rows_of<T>(a.values, a.ids, a.count), dim * kElementSize<T>);
  alignas(64) float weights[kMaxGroup * kBlock];
  Running running[kMaxGroup];
  for (uint32_t h = 0; h < a.group; ++h) running[h] = {0.0F, 0.0F, 1.0F};
  values.prefetch_first();
  for (size_t begin = 0; begin < a.count; begin += kBlock) {
    const size_t n = a.count - begin < kBlock ? a.count - begin : kBlock;
    values.advance(begin);
    for (uint32_t h = 0; h < a.group; ++h) {
      __builtin_memcpy(weights + h * kBlock, a.weights + h * a.weight_stride + begin,
                       n * sizeof(float));
    }
    sum_block<S, T>({values.current(), values.has_next ? values.next() : values.current(), n, dim,
                     weights, running, a.o, values.scales()},
                    a.group);
  }
}

}  // namespace
}  // namespace keyhole::cpu

// Kernels for keys that a search has scored: log-sum-exp, a filter by weight, and partial attention that reads their
// values only.
#pragma once

#include "cpu/simd/attend.h"

namespace keyhole::cpu {
namespace {

template <class S, DType T>
void attend_scored(const AttendScoredArgs& a) {
  const uint32_t dim = a.values.dim;
  RowBlocks values(rows_of<T>(a.values, a.ids, a.count), dim * kElementSize<T>);
  alignas(64) float weights[kMaxGroup * kBlock];
  Running running[kMaxGroup];
  for (uint32_t h = 0; h < a.group; ++h) running[h] = {kMinusInf, 0.0F, 0.0F};
  for (size_t i = 0; i < a.group * kBlock; ++i) weights[i] = 0.0F;
  for (size_t i = 0; i < size_t{a.group} * dim; ++i) a.o[i] = 0.0F;

  values.prefetch_first();
  for (size_t begin = 0; begin < a.count; begin += kBlock) {
    const size_t n = a.count - begin < kBlock ? a.count - begin : kBlock;
    values.advance(begin);
    for (uint32_t h = 0; h < a.group; ++h) {
      __builtin_memcpy(weights + h * kBlock, a.scores + h * a.score_stride + begin,
                       n * sizeof(float));
      weigh<S>(weights + h * kBlock, n, a.logits, running[h]);
    }
    sum_block<S, T>({values.current(), values.has_next ? values.next() : values.current(), n, dim,
                     weights, running, a.o, values.scales()},
                    a.group);
  }
  if (!normalise<S>(a, running) && a.count > 0) attend_scored_in_double(a, T);
}

/// Logits of kWidth inner products.
template <class S>
[[gnu::always_inline]] inline typename S::F logits_of(typename S::F scores, const LogitParams& p) {
  const auto x = S::mul(scores, S::set1(p.scale));
  if (p.softcap <= 0.0F) return x;
  const auto cap = S::set1(p.softcap);
  return S::mul(cap, tanh<S>(S::div(x, cap)));
}

/// Computes ln sum e^logit in two passes, so that nothing is rescaled on the way. Logits rise with scores, so the
/// first pass needs no logit.
template <class S>
float log_sum_exp(const float* scores, size_t count, const LogitParams& logits) {
  using F = typename S::F;
  constexpr size_t kRun =
      64 * S::kWidth;  // added up before it enters the total: keeps roundings few
  const F minus_inf = S::set1(kMinusInf);
  const size_t whole = count / S::kWidth * S::kWidth;
  float rest[S::kWidth] = {};
  __builtin_memcpy(rest, scores + whole, (count - whole) * sizeof(float));
  F largest = S::first_lanes(S::load_f32(rest), minus_inf, count - whole);
  for (size_t i = 0; i < whole; i += S::kWidth) largest = S::max(largest, S::load_f32(scores + i));
  const F top = logits_of<S>(S::set1(S::reduce_max(largest)), logits);

  F total = softmax_weight<S>(S::sub(
      S::first_lanes(logits_of<S>(S::load_f32(rest), logits), minus_inf, count - whole), top));
  for (size_t begin = 0; begin < whole; begin += kRun) {
    const size_t end = whole - begin < kRun ? whole : begin + kRun;
    F sum = S::zero();
    for (size_t i = begin; i < end; i += S::kWidth) {
      const F logit = logits_of<S>(S::load_f32(scores + i), logits);
      sum = S::add(sum, softmax_weight<S>(S::sub(logit, top)));
    }
    total = S::add(total, sum);
  }
  return count == 0 ? kMinusInf : S::first(top) + __builtin_logf(S::reduce_add(total));
}

template <class S>
size_t keep_above(const KeepArgs& a) {
  using F = typename S::F;
  size_t kept = 0;
  size_t i = 0;
  // Writes end where reads have been: `kept` never passes i.
  for (; i + S::kWidth <= a.count; i += S::kWidth) {
    uint32_t lanes = 0;
    for (uint32_t h = 0; h < a.group; ++h) {
      const F score = S::load_f32(a.scores + h * a.score_stride + i);
      lanes |= S::greater_lanes(score, S::set1(a.thresholds[h]));
    }
    if (lanes == 0) continue;
    for (uint32_t h = 0; h < a.group; ++h) {
      float* scores = a.scores + h * a.score_stride;
      S::store_lanes(scores + kept, S::load_f32(scores + i), lanes);
    }
    for (; lanes != 0; lanes &= lanes - 1) a.ids[kept++] = a.ids[i + __builtin_ctz(lanes)];
  }
  for (; i < a.count; ++i) {
    bool above = false;
    for (uint32_t h = 0; h < a.group; ++h) {
      above = above || a.scores[h * a.score_stride + i] > a.thresholds[h];
    }
    if (!above) continue;
    for (uint32_t h = 0; h < a.group; ++h) {
      a.scores[h * a.score_stride + kept] = a.scores[h * a.score_stride + i];
    }
    a.ids[kept++] = a.ids[i];
  }
  return kept;
}

}  // namespace
}  // namespace keyhole::cpu

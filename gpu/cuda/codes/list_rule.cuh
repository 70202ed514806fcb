// What the choice among lists knows of a list for a head, by the rule of index/scan/list_choice.h.
#pragma once

#include "gpu/cuda/codes/queries.cuh"

namespace keyhole::gpu::codes {

// These are the numbers of index/scan/list_choice.cpp.
constexpr float kDeepestList =
    32.0F;  ///< nats below a head's heaviest list at which lists count as its lightest
constexpr float kWidestSpread = 16.0F;  ///< variance up to which all of it counts
constexpr float kFarSpread = 8.0F;      ///< 2 sqrt(kWidestSpread)
constexpr float kBinsPerNat = 8.0F;
constexpr float kWeightBinsPerNat = 32.0F;
constexpr float kLittleWeight = 1.0F / 64.0F;  ///< of a head's weight, which it may always leave
constexpr float kWideList = 16.0F;  ///< variance from which a row of an unread list may be anything

/// A list's logit for a head, and how far rows may lie above it.
struct ListLogit {
  float logit;   ///< base 2
  float spread;  ///< variance of the rows' logits, nats^2
};
/// score: base 2, before a soft-cap; noise: HeadConstants::noise; spread: ListFigures::spread.
__device__ inline ListLogit logit_of_list(float score, float noise, float spread, float cap) {
  float slope = 1.0F;
  const float logit = cap == 0.0F ? score : capped(score, cap, slope);
  return {logit, 2.0F * kLn2 * noise * slope * slope * spread};
}
/// By how much a list counts, in nats.
__device__ inline float hope_of_list(const ListLogit& list, float log_rows) {
  const float t = list.spread;
  const float above = t <= kWidestSpread ? t : fmaf(kFarSpread, sqrtf(t), -kWidestSpread);
  return fmaf(list.logit, kLn2, above) + log_rows;
}
/// The weight of an unread list's row on average, relative to the head's largest mean logit. top: that logit, base 2.
__device__ inline float weight_of_list(const ListLogit& list, float log_rows, float top) {
  const float above = list.logit - top;
  // Many of a list's rows make up the weight by second order, up to a variance of twice the logarithm of their number;
  // from there on the largest row alone does.
  const float nats = list.spread <= 2.0F * log_rows
                         ? 0.5F * list.spread
                         : sqrtf(2.0F * list.spread * log_rows) - log_rows;
  return exp2_fast(fminf(fmaf(nats, kLog2E, above), 0.0F));
}

}  // namespace keyhole::gpu::codes

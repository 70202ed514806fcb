// When codes cannot tell which rows weigh, and how far a row's logit may be from the one that its code has: what the
// host (index/scan/code_scan_doubt.cpp, which explains it) and the device (gpu/cuda/codes/doubt.cuh) ask of a query
// head after the rows that it has chosen were read exactly.
#pragma once

#include <cmath>
#include <cstdint>

#include "cpu/code_layout.h"

#if defined(__CUDACC__)
#define KEYHOLE_ANYWHERE __host__ __device__ inline
#else
#define KEYHOLE_ANYWHERE inline
#endif

namespace keyhole {

/// The noise of a run of rows with one that fp16 cannot hold: thousands of times as long as those that the balance
/// was learned from. What its codes say may be off by anything. Finite, so that a weight by code is.
inline constexpr float kUnknownNoise = 1e6F;

/// Standard deviations of a code's error that are thought possible: 1 of 32,000 errors is larger.
inline constexpr float kDoubtDeviations = 4.0F;
/// The variance up to which sums of weights by code are believed.
inline constexpr float kKnownVariance = 2.0F;
/// In heads most of whose weight is unread a row's variance is so many times the mean: the one key of thousands that
/// is many times longer than others must not make a head doubtful.
inline constexpr float kLongerKeys = 2.0F;
/// Rows are read again, with what the log-sum-exp has become, where it has fallen by so many nats, and so often at
/// most. If it still falls then, all rows are read.
inline constexpr float kDoubtFall = 1.0F;
inline constexpr uint32_t kDoubtRounds = 3;
/// Where exact attention leaves less than this of what the codes weighed, what rounding has left of these would show:
/// the others are summed up once more, without the rows that were read.
inline constexpr float kLeastKept = 0.1F;

/// By the bits of keys or values, whichever are fewer.
struct DoubtLimits {
  float error;  ///< of the output, from which on more rows are read
  float light;  ///< nats below the log-sum-exp at which a row does not matter
  /// In heads most of whose weight is unread and whose variance is above kKnownVariance: ln of e^t w from which on
  /// errors of single rows show. One bit is not asked for answers that would take it to read everything.
  float likely;
  float value_square;  ///< the squared error of a value by its code
};
[[nodiscard]] KEYHOLE_ANYWHERE DoubtLimits doubt_limits(const CodeShape& shape) {
  const uint32_t of_values = shape.value_bits;
  const float square = of_values == 0   ? 1.0F
                       : of_values == 1 ? 0.57F
                       : of_values == 2 ? 0.135F
                                        : 0.0117F;
  const float likely = shape.key_bits == 1 ? 0.0F : -2.3F;
  return shape.key_bits == 4 && of_values == 4 ? DoubtLimits{0.015F, 6.0F, likely, square}
                                               : DoubtLimits{0.07F, 4.0F, likely, square};
}

/// cap * tanh(x / cap); cap 0: x.
[[nodiscard]] KEYHOLE_ANYWHERE float capped_logit(float x, float cap) {
  return cap > 0.0F ? cap * std::tanh(x / cap) : x;
}
/// What capped_logit() gives `logit` for; +-inf where it never does.
[[nodiscard]] KEYHOLE_ANYWHERE float uncapped_logit(float logit, float cap) {
  if (!(cap > 0.0F)) return logit;
  const float share = logit / cap;
  if (share >= 1.0F) return HUGE_VALF;
  return share <= -1.0F ? -HUGE_VALF : cap * std::atanh(share);
}

/// What is known of a query head. Weights are their natural logarithms.
struct HeadDoubt {
  float lse = 0.0F;  ///< of all rows, as far as it is known
  float unread =
      0.0F;  ///< of the rows that were not read, by their codes; -inf: too little to be seen
  float heaviest = 0.0F;  ///< of the heaviest of these, by its code
  float spread =
      0.0F;  ///< (scale |q'|)^2: the variance of a logit by code, before a soft-cap, for f^2 noise = 1
  float widest = 0.0F;   ///< the largest f^2 noise of a row
  float rows = 1.0F;     ///< that were read
  float softcap = 0.0F;  ///< as LogitParams::softcap
};

/// Whether codes cannot tell which of the head's rows weigh. usual(): the mean of f^2 noise over the rows; called
/// where it matters.
template <class Usual>
[[nodiscard]] KEYHOLE_ANYWHERE bool is_in_doubt(const HeadDoubt& head, const DoubtLimits& limits,
                                                const Usual& usual) {
  const auto larger = [](float a, float b) { return a < b ? b : a; };
  const auto smaller = [](float a, float b) { return b < a ? b : a; };
  const auto is_finite = [](float x) { return x - x == 0.0F; };
  if (!is_finite(head.lse) || !is_finite(head.heaviest)) return false;
  const float cap = head.softcap;
  // The noise was taken from the weight.
  const float logit = head.heaviest + smaller(0.5F * head.spread * head.widest, kMostNoiseBias);
  const float cut = uncapped_logit(logit, cap);
  const float bound = uncapped_logit(head.lse - limits.light, cap);
  // By how much the logit of the heaviest unread row may be off, if the row has this f^2 noise.
  const auto reach_of = [&](float noise) {
    const float far = kDoubtDeviations * std::sqrt(head.spread * noise);
    const float above = capped_logit(cut + far, cap) - logit;
    // Where a soft-cap flattens the heaviest logits, those of rows that are lighter by a code's error are not flat.
    const float lower = smaller(cut, larger(bound, 0.0F));
    const float below = capped_logit(lower, cap) - capped_logit(lower - far, cap);
    return larger(larger(above, below), 0.0F);
  };
  const auto variance_of = [](float reach) {
    return reach / kDoubtDeviations * (reach / kDoubtDeviations);
  };
  const float reach = reach_of(head.widest);
  const float t = variance_of(reach);
  const float unread = std::exp(head.unread - head.lse);
  const float heaviest = std::exp(head.heaviest - head.lse);
  const float most_of_16 = 16.0F * heaviest;
  const bool may_be_sharp = 1.5F * most_of_16 >= unread - 0.15F;
  if (t <= kKnownVariance) {
    // |o|^2 is at least that of the rows that were read, if they weigh alike.
    const float read = 1.0F - unread;
    const float square = larger(read * read / head.rows, heaviest * heaviest);
    const float error = (std::expm1(t) + limits.value_square) * smaller(heaviest, unread) * unread;
    return may_be_sharp && error > limits.error * limits.error * square;
  }
  if (unread < 0.5F || may_be_sharp) {
    const float far = kDoubtDeviations * std::sqrt(head.spread * head.widest);
    return capped_logit(cut + far, cap) > head.lse - limits.light;
  }
  const float usual_reach = reach_of(smaller(head.widest, kLongerKeys * usual()));
  return smaller(variance_of(usual_reach), usual_reach) + head.heaviest - head.lse > limits.likely;
}

}  // namespace keyhole

#undef KEYHOLE_ANYWHERE

// Doubt: when codes cannot tell which rows of a query head weigh, and how far the logit of a row may be from the
// logit by its code. The host (index/scan/code_scan_doubt.cpp, which explains it) and the device
// (gpu/cuda/codes/doubt.cuh) both ask this after the chosen rows were read exactly.
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

/// The noise of a run of rows of which fp16 cannot hold one, because it is thousands of times as long as the rows
/// that the balance was learned from: its codes may be off by anything. Finite, so that weights by code stay finite.
inline constexpr float kUnknownNoise = 1e6F;

/// How many standard deviations a code's error may have to be thought possible: 1 error of 32,000 is larger.
inline constexpr float kDoubtDeviations = 4.0F;
/// Sums of weights by code are believed up to this variance of their logits.
inline constexpr float kKnownVariance = 2.0F;
/// In heads most of whose weight is unread, the variance of a row is taken to be this many times the mean, so that
/// the one key of thousands that is many times longer than the others does not put a head in doubt.
inline constexpr float kLongerKeys = 2.0F;
/// Rows are read again, with the new log-sum-exp, where it has fallen by more than this many nats, and at most this
/// many times. If it still falls then, all rows are read.
inline constexpr float kDoubtFall = 1.0F;
inline constexpr uint32_t kDoubtRounds = 3;
/// If exact attention leaves less than this share of what codes said the chosen rows weigh, rounding would show in
/// the remainder: then the other rows are summed up once more, without those that were read.
inline constexpr float kLeastKept = 0.1F;

/// The limits beyond which codes are doubted. They depend on the bits of keys or of values, whichever are fewer.
struct DoubtLimits {
  float error;  ///< error of the output from which on more rows are read
  float light;  ///< nats below the log-sum-exp at which a row does not matter, see light_of()
  /// ln of e^t w from which on errors of single rows show, for heads most of whose weight is unread and whose
  /// variance is above kKnownVariance. With one bit the limit is so high that answers do not require reading
  /// everything.
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

/// cap * tanh(x / cap), or x where cap is 0.
[[nodiscard]] KEYHOLE_ANYWHERE float capped_logit(float x, float cap) {
  return cap > 0.0F ? cap * std::tanh(x / cap) : x;
}
/// The x for which capped_logit() gives `logit`; +-inf where no x does.
[[nodiscard]] KEYHOLE_ANYWHERE float uncapped_logit(float logit, float cap) {
  if (!(cap > 0.0F)) return logit;
  const float share = logit / cap;
  if (share >= 1.0F) return HUGE_VALF;
  return share <= -1.0F ? -HUGE_VALF : cap * std::atanh(share);
}

/// What is known of one query head. Weights are given as natural logarithms.
struct HeadDoubt {
  float lse = 0.0F;  ///< log-sum-exp of all rows, as far as it is known
  float unread =
      0.0F;  ///< of the rows that were not read, by their codes; -inf: too little to be seen
  float heaviest = 0.0F;  ///< weight of the heaviest unread row, by its code
  float spread =
      0.0F;  ///< (scale |q'|)^2: the variance of a logit by code, before a soft-cap, for f^2 noise = 1
  float widest = 0.0F;   ///< the largest f^2 noise of a row
  float rows = 1.0F;     ///< rows that were read
  float softcap = 0.0F;  ///< as LogitParams::softcap
  /// The squared length of the output, |o|^2, in units of a value's (Balance::value_scale^2 * dim); 0: not known.
  float square = 0.0F;
};

/// The squared length of the output, in units of a value's, if values are alike in length: at least that of the rows
/// that were read, if all of them weigh alike, or of the heaviest unread one. unread, heaviest: their weights.
[[nodiscard]] KEYHOLE_ANYWHERE float square_of_weights(float unread, float heaviest, float rows) {
  const float read = 1.0F - unread, of_read = read * read / rows, of_one = heaviest * heaviest;
  return of_read < of_one ? of_one : of_read;
}

/// How many nats below the log-sum-exp a row of the head does not matter: DoubtLimits::light, and more where the
/// output is known to be shorter than its weights say. So it is where most weight lies on a row whose value is short,
/// as those of sinks are: beside it a light row counts for as much as its value is longer.
[[nodiscard]] KEYHOLE_ANYWHERE float light_of(const HeadDoubt& head, const DoubtLimits& limits) {
  if (!(head.square > 0.0F)) return limits.light;
  const float square = square_of_weights(std::exp(head.unread - head.lse),
                                         std::exp(head.heaviest - head.lse), head.rows);
  return head.square < square ? limits.light + 0.5F * std::log(square / head.square) : limits.light;
}

/// Whether codes cannot tell which rows of the head weigh. usual() returns the mean of f^2 noise over the rows; it is
/// called only where the answer depends on it.
template <class Usual>
[[nodiscard]] KEYHOLE_ANYWHERE bool is_in_doubt(const HeadDoubt& head, const DoubtLimits& limits,
                                                const Usual& usual) {
  const auto larger = [](float a, float b) { return a < b ? b : a; };
  const auto smaller = [](float a, float b) { return b < a ? b : a; };
  const auto is_finite = [](float x) { return x - x == 0.0F; };
  if (!is_finite(head.lse) || !is_finite(head.heaviest)) return false;
  const float cap = head.softcap, light = light_of(head, limits);
  // The weight by code already has the noise taken from it.
  const float logit = head.heaviest + smaller(0.5F * head.spread * head.widest, kMostNoiseBias);
  const float cut = uncapped_logit(logit, cap);
  const float bound = uncapped_logit(head.lse - light, cap);
  // reach_of(noise): how far the logit of the heaviest unread row may be off if the row has this f^2 noise.
  const auto reach_of = [&](float noise) {
    const float far = kDoubtDeviations * std::sqrt(head.spread * noise);
    const float above = capped_logit(cut + far, cap) - logit;
    // A soft-cap flattens the heaviest logits, but not those of rows that are lighter by a code's error.
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
    const float by_weights = square_of_weights(unread, heaviest, head.rows);
    const float square = head.square > 0.0F ? smaller(by_weights, head.square) : by_weights;
    const float error = (std::expm1(t) + limits.value_square) * smaller(heaviest, unread) * unread;
    return may_be_sharp && error > limits.error * limits.error * square;
  }
  if (unread < 0.5F || may_be_sharp) {
    const float far = kDoubtDeviations * std::sqrt(head.spread * head.widest);
    return capped_logit(cut + far, cap) > head.lse - light;
  }
  const float usual_reach = reach_of(smaller(head.widest, kLongerKeys * usual()));
  return smaller(variance_of(usual_reach), usual_reach) + head.heaviest - head.lse > limits.likely;
}

}  // namespace keyhole

#undef KEYHOLE_ANYWHERE

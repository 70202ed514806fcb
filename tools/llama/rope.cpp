#include "tools/llama/rope.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <stdexcept>
#include <string>

namespace keyhole::tools {
namespace {

/// Llama 3.1: slow pairs are slowed down by the factor, fast ones stay, those between are mixed.
double llama3_frequency(double frequency, const RopeScaling& scaling) {
  const double wavelength = 2.0 * std::numbers::pi / frequency;
  const double context = scaling.original_context;
  if (wavelength < context / scaling.high_freq_factor) return frequency;
  if (wavelength > context / scaling.low_freq_factor) return frequency / scaling.factor;
  const double keep = (context / wavelength - scaling.low_freq_factor) /
                      (scaling.high_freq_factor - scaling.low_freq_factor);
  return (1.0 - keep) * frequency / scaling.factor + keep * frequency;
}

/// YaRN: the same idea with a ramp that is linear in the number of the pair, between those that make beta_fast and
/// beta_slow turns within the original context.
class YarnRamp {
 public:
  YarnRamp(uint32_t dims, double theta, const RopeScaling& scaling) : factor_(scaling.factor) {
    const auto pair_with_turns = [&](double turns) {
      return dims * std::log(scaling.original_context / (turns * 2.0 * std::numbers::pi)) /
             (2.0 * std::log(theta));
    };
    low_ = pair_with_turns(scaling.beta_fast);
    high_ = pair_with_turns(scaling.beta_slow);
    if (scaling.whole_pairs) {
      low_ = std::floor(low_);
      high_ = std::ceil(high_);
    }
    low_ = std::max(low_, 0.0);
    high_ = std::min(high_, dims - 1.0);
    if (low_ == high_) high_ += 0.001;
  }
  [[nodiscard]] double frequency(size_t pair, double frequency) const {
    const double slowed = std::clamp((static_cast<double>(pair) - low_) / (high_ - low_), 0.0, 1.0);
    return frequency * (1.0 - slowed) + frequency / factor_ * slowed;
  }

 private:
  double factor_, low_ = 0.0, high_ = 0.0;
};

}  // namespace

Rope::Rope(uint32_t head_dim, const RopeSettings& settings, size_t rope_tokens)
    : head_dim_(head_dim),
      factor_(settings.scaling.attention_factor),
      end_(std::numeric_limits<size_t>::max()),
      frequencies_(settings.dims / 2) {
  const RopeScaling& scaling = settings.scaling;
  const bool is_long = rope_tokens > scaling.original_context;
  if (scaling.kind == RopeScaling::Kind::longrope && !is_long) end_ = scaling.original_context;
  for (size_t i = 0; i < frequencies_.size(); ++i) {
    double frequency = std::pow(settings.theta, -2.0 * static_cast<double>(i) / settings.dims);
    switch (scaling.kind) {
      case RopeScaling::Kind::none: break;
      case RopeScaling::Kind::linear: frequency /= scaling.factor; break;
      case RopeScaling::Kind::llama3: frequency = llama3_frequency(frequency, scaling); break;
      case RopeScaling::Kind::yarn:
        frequency = YarnRamp(settings.dims, settings.theta, scaling).frequency(i, frequency);
        break;
      case RopeScaling::Kind::longrope:
        frequency /= (is_long ? scaling.long_factors : scaling.short_factors)[i];
        break;
    }
    frequencies_[i] = frequency;
  }
}

void Rope::angles(uint32_t position, float* cosines, float* sines) const {
  for (size_t i = 0; i < frequencies_.size(); ++i) {
    const double angle = position * frequencies_[i];
    cosines[i] = static_cast<float>(factor_ * std::cos(angle));
    sines[i] = static_cast<float>(factor_ * std::sin(angle));
  }
}

void Rope::rotate(float* x, uint32_t heads, const float* cosines, const float* sines) const {
  const size_t half = frequencies_.size();
  for (uint32_t head = 0; head < heads; ++head, x += head_dim_) {
    for (size_t i = 0; i < half; ++i) {
      const float low = x[i];
      const float high = x[i + half];
      x[i] = low * cosines[i] - high * sines[i];
      x[i + half] = high * cosines[i] + low * sines[i];
    }
  }
}

bool turns_otherwise(const LlamaConfig& config, size_t rope_tokens, size_t tokens) {
  const auto changes = [&](const RopeSettings& rope) {
    const size_t context = rope.scaling.original_context;
    return rope.scaling.kind == RopeScaling::Kind::longrope &&
           (rope_tokens > context) != (tokens > context);
  };
  return changes(config.rope) || changes(config.sliding_rope);
}

bool has_longrope(const LlamaConfig& config) {
  return config.rope.scaling.kind == RopeScaling::Kind::longrope ||
         config.sliding_rope.scaling.kind == RopeScaling::Kind::longrope;
}

void check_rope_end(size_t tokens, size_t end) {
  if (tokens <= end) return;
  throw std::runtime_error("the sequence has reached " + std::to_string(end) +
                           " tokens, where this model's LongRoPE takes other frequencies; "
                           "allowed: to end there, to take all tokens anew, or a longer prompt");
}

}  // namespace keyhole::tools

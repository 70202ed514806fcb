#include "tools/llama/rope.h"

#include <cmath>
#include <numbers>

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

}  // namespace

Rope::Rope(uint32_t head_dim, double theta, const RopeScaling& scaling)
    : frequencies_(head_dim / 2) {
  for (size_t i = 0; i < frequencies_.size(); ++i) {
    double frequency = std::pow(theta, -2.0 * static_cast<double>(i) / head_dim);
    switch (scaling.kind) {
      case RopeScaling::Kind::none: break;
      case RopeScaling::Kind::linear: frequency /= scaling.factor; break;
      case RopeScaling::Kind::llama3: frequency = llama3_frequency(frequency, scaling); break;
    }
    frequencies_[i] = frequency;
  }
}

void Rope::angles(uint32_t position, float* cosines, float* sines) const {
  for (size_t i = 0; i < frequencies_.size(); ++i) {
    const double angle = position * frequencies_[i];
    cosines[i] = static_cast<float>(std::cos(angle));
    sines[i] = static_cast<float>(std::sin(angle));
  }
}

void Rope::rotate(float* x, uint32_t heads, const float* cosines, const float* sines) const {
  const size_t half = frequencies_.size();
  for (uint32_t head = 0; head < heads; ++head, x += 2 * half) {
    for (size_t i = 0; i < half; ++i) {
      const float low = x[i];
      const float high = x[i + half];
      x[i] = low * cosines[i] - high * sines[i];
      x[i + half] = high * cosines[i] + low * sines[i];
    }
  }
}

}  // namespace keyhole::tools

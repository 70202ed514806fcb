#include "tools/caches/kvarn.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "runtime/files/float16.h"
#include "tools/caches/affine_codes.h"

namespace keyhole::tools {
namespace {

constexpr uint32_t kTile = 128;
constexpr int kIterations = 16;

/// Divides numbers[0], numbers[stride], ... by their standard deviation, and returns it; 1 where they do not vary.
double divide_by_deviation(double* numbers, size_t count, size_t stride) {
  double sum = 0.0, squares = 0.0;
  for (size_t i = 0; i < count; ++i) sum += numbers[i * stride];
  const double mean = sum / static_cast<double>(count);
  for (size_t i = 0; i < count; ++i) {
    squares += (numbers[i * stride] - mean) * (numbers[i * stride] - mean);
  }
  const double deviation = std::sqrt(squares / static_cast<double>(count));
  // Rounding alone makes equal numbers vary by some 1e-16 of them.
  if (!(deviation > 1e-9 * std::abs(mean))) return 1.0;
  for (size_t i = 0; i < count; ++i) numbers[i * stride] /= deviation;
  return deviation;
}

/// The channels of a value's token that share a step.
uint32_t together(uint32_t head_dim) { return head_dim % kTile == 0 ? kTile : head_dim; }

float fp16_of(double x) { return f16_to_f32(f32_to_f16(static_cast<float>(x))); }

class Kvarn : public AgingFormat {
 public:
  Kvarn(KvarnBits bits, uint32_t head_dim)
      : AgingFormat(kvarn_layout(bits, head_dim)), bits_(bits), dim_(head_dim) {}

  void pass(uint32_t /*layer*/, uint32_t /*kv_head*/, KvRows rows, float* numbers,
            size_t count) const override {
    const uint32_t turned = dim_ & (~dim_ + 1);
    for (size_t first = 0; first < count; first += kTile) {
      float* tile = numbers + first * dim_;
      const size_t size = size_t{kTile} * dim_;
      walsh_hadamard(tile, size, turned);
      const VarianceScales scales = normalise_variance(tile, kTile, dim_);
      rows == KvRows::keys ? round_keys(tile, scales) : round_values(tile, scales);
      walsh_hadamard(tile, size, turned);
    }
  }

 private:
  void round_keys(float* tile, const VarianceScales& scales) const {
    for (size_t c = 0; c < dim_; ++c) {
      round_affine(tile + c, kTile, dim_, bits_.keys, static_cast<float>(scales.of_channel[c]));
    }
    for (size_t t = 0; t < kTile; ++t) {
      const float of_token = fp16_of(scales.of_token[t]);
      for (size_t c = 0; c < dim_; ++c) tile[t * dim_ + c] *= of_token;
    }
  }

  void round_values(float* tile, const VarianceScales& scales) const {
    const size_t group = together(dim_);
    for (size_t t = 0; t < kTile; ++t) {
      float* row = tile + t * dim_;
      for (size_t c = 0; c < dim_; c += group) {
        round_affine(row + c, group, 1, bits_.values, static_cast<float>(scales.of_token[t]));
      }
      for (size_t c = 0; c < dim_; ++c) row[c] *= fp16_of(scales.of_channel[c]);
    }
  }

  const KvarnBits bits_;
  const uint32_t dim_;
};

}  // namespace

VarianceScales normalise_variance(float* numbers, size_t tokens, size_t channels) {
  VarianceScales scales{std::vector<double>(channels, 1.0), std::vector<double>(tokens, 1.0)};
  std::vector<double> x(numbers, numbers + tokens * channels);
  for (int i = 0; i < kIterations; ++i) {
    for (size_t c = 0; c < channels; ++c) {
      scales.of_channel[c] *= divide_by_deviation(x.data() + c, tokens, channels);
    }
    for (size_t t = 0; t < tokens; ++t) {
      scales.of_token[t] *= divide_by_deviation(x.data() + t * channels, channels, 1);
    }
  }
  double logs = 0.0;
  for (const double factor : scales.of_token) logs += std::log(factor);
  const double mean = std::exp(logs / static_cast<double>(tokens));
  for (double& factor : scales.of_token) factor /= mean;
  for (double& factor : scales.of_channel) factor *= mean;
  for (size_t k = 0; k < x.size(); ++k) numbers[k] = static_cast<float>(x[k]);
  return scales;
}

AgingLayout kvarn_layout(KvarnBits bits, uint32_t head_dim) {
  if (head_dim == 0 || head_dim % 32 != 0) {
    throw std::invalid_argument("head_dim is " + std::to_string(head_dim) +
                                "; allowed: multiples of 32, whose channels are turned together");
  }
  const double keys = bits.keys + kAffineGroupBits / kTile + 16.0 / head_dim;
  const double values = bits.values + kAffineGroupBits / together(head_dim) + 16.0 / kTile;
  return {.sink = kTile,
          .keys = {.recent = 0, .granule = kTile, .bits = keys},
          .values = {.recent = 0, .granule = kTile, .bits = values}};
}

std::shared_ptr<const AgingFormat> make_kvarn(KvarnBits bits, uint32_t head_dim) {
  return std::make_shared<Kvarn>(bits, head_dim);
}

}  // namespace keyhole::tools

#include "cpu/quantise.h"

#include <algorithm>
#include <cmath>

#include "cpu/half.h"

namespace keyhole::cpu {
namespace {

constexpr float kRound = 0x1.8p23F;
constexpr float kLeastChannel = 1e-30F;

// The arrays do not overlap. Compilers do not know that, because int8 may alias anything, and would take one element
// at a time.

void raise(const float* __restrict row, uint32_t dim, float* __restrict largest) {
  for (uint32_t j = 0; j < dim; ++j) largest[j] = std::max(largest[j], std::fabs(row[j]));
}

void divide(const float* __restrict row, const float* __restrict divisors, uint32_t dim,
            int8_t* __restrict out) {
  for (uint32_t j = 0; j < dim; ++j) {
    const auto q = static_cast<int32_t>((row[j] / divisors[j] + kRound) - kRound);  // as below
    const int32_t low = q < -127 ? -127 : q;
    out[j] = static_cast<int8_t>(low > 127 ? 127 : low);
  }
}

}  // namespace

float quantise_row(const float* src, uint32_t dim, int8_t* dst) {
  float largest = 0.0F;
  for (uint32_t j = 0; j < dim; ++j) largest = std::max(largest, std::fabs(src[j]));
  float scale = largest / 127.0F;
  if (scale * 127.0F < largest * 0.999F) {
    // A subnormal quotient lost its precision on the way down; one step up keeps |q| <= 127.
    scale = std::nextafter(scale, largest);
  }
  if (scale == 0.0F) {
    std::fill_n(dst, dim, int8_t{0});
    return 0.0F;
  }
  for (uint32_t j = 0; j < dim; ++j) {
    const float q = std::max(-127.0F, std::min(127.0F, src[j] / scale));
    // Adding 1.5 * 2^23 rounds to nearest even, as std::nearbyint() would: on baseline x86-64 that is a call for
    // each element, which took a fifth of a tail's estimate at 32k keys.
    dst[j] = static_cast<int8_t>((q + kRound) - kRound);
  }
  return scale;
}

void ChannelQuantiser::look(const float* row) { raise(row, dim_, numbers_); }

void ChannelQuantiser::choose_scales(float most, uint16_t* scales) {
  for (uint32_t j = 0; j < dim_; ++j) {
    scales[j] = numbers_[j] < kLeastChannel ? uint16_t{0} : f32_to_bf16(numbers_[j] / 127.0F);
    if (!(127.0F * bf16_to_f32(scales[j]) <= most)) --scales[j];
    // A channel without a scale has nothing that rounds to more than 0.
    numbers_[j] = scales[j] == 0 ? 1.0F : bf16_to_f32(scales[j]);
  }
}

void ChannelQuantiser::write(const float* row, int8_t* out) const {
  divide(row, numbers_, dim_, out);
}

}  // namespace keyhole::cpu

#include "tools/caches/affine_codes.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "runtime/files/float16.h"

namespace keyhole::tools {
namespace {

float as_fp16(float x) { return f16_to_f32(f32_to_f16(x)); }

}  // namespace

void round_affine(float* numbers, size_t count, size_t stride, unsigned bits, float scale) {
  float least = numbers[0], most = numbers[0];
  bool finite = true;
  for (size_t i = 0; i < count; ++i) {
    const float x = numbers[i * stride];
    finite = finite && std::isfinite(x);
    least = std::min(least, x);
    most = std::max(most, x);
  }
  const auto levels = static_cast<float>((1U << bits) - 1U);
  const float step = (most - least) / levels;
  const float stored_step = as_fp16(scale * step), stored_zero = as_fp16(scale * least);
  if (!finite || !std::isfinite(stored_step) || !std::isfinite(stored_zero)) {
    for (size_t i = 0; i < count; ++i) {
      numbers[i * stride] = std::numeric_limits<float>::quiet_NaN();
    }
    return;
  }
  for (size_t i = 0; i < count; ++i) {
    float& x = numbers[i * stride];
    const float code =
        step > 0.0F ? std::clamp(std::round((x - least) / step), 0.0F, levels) : 0.0F;
    x = code * stored_step + stored_zero;
  }
}

}  // namespace keyhole::tools

#include "tools/caches/kv_format.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "runtime/files/float16.h"

namespace keyhole::tools {
namespace {

/// The block's number of largest magnitude with its sign, the first of equal ones; NaN where one is no number.
float largest(const float* x) {
  float most = 0.0F;
  for (uint32_t i = 0; i < kKvFormatBlock; ++i) {
    if (!std::isfinite(x[i])) return std::numeric_limits<float>::quiet_NaN();
    if (std::abs(x[i]) > std::abs(most)) most = x[i];
  }
  return most;
}

float as_level(KvFormat format, float scaled) {
  if (has_8_bits(format)) return std::round(scaled);
  // At most 16.5 before the cut, where x is minus the largest magnitude.
  return std::min(15.0F, std::floor(scaled + 8.5F)) - 8.0F;
}

void pass_block(KvFormat format, float* x) {
  const float most = largest(x);
  const float scale = has_8_bits(format) ? std::abs(most) / 127.0F : most / -8.0F;
  const float stored = f16_to_f32(f32_to_f16(scale));
  if (!std::isfinite(stored)) {
    std::fill_n(x, kKvFormatBlock, std::numeric_limits<float>::quiet_NaN());
    return;
  }
  // Magnitudes near 2^-149 have no inverse in fp32: all of such a block is zero, as its scale in fp16 is.
  const float inverse = stored == 0.0F ? 0.0F : 1.0F / scale;
  for (uint32_t i = 0; i < kKvFormatBlock; ++i) x[i] = as_level(format, x[i] * inverse) * stored;
}

}  // namespace

void walsh_hadamard(float* numbers, size_t count, uint32_t size) {
  const float scale = 1.0F / std::sqrt(static_cast<float>(size));
  for (float* part = numbers; part < numbers + count; part += size) {
    for (uint32_t half = 1; half < size; half *= 2) {
      for (uint32_t i = 0; i < size; ++i) {
        if ((i & half) != 0) continue;
        const float a = part[i], b = part[i + half];
        part[i] = a + b;
        part[i + half] = a - b;
      }
    }
    for (uint32_t i = 0; i < size; ++i) part[i] *= scale;
  }
}

void pass_rows(KvFormat format, float* rows, size_t count, uint32_t head_dim, bool values) {
  const uint32_t together = rotated_together(format, head_dim, values);
  if (together != 0) walsh_hadamard(rows, count, together);
  pass_through(format, rows, count);
  if (together != 0) walsh_hadamard(rows, count, together);
}

void pass_through(KvFormat format, float* numbers, size_t count) {
  for (size_t i = 0; i + kKvFormatBlock <= count; i += kKvFormatBlock) {
    pass_block(format, numbers + i);
  }
}

}  // namespace keyhole::tools

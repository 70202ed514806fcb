// Conversion between fp32 and the 16-bit floating-point types, without instructions beyond baseline
// x86-64. All conversions to 16 bits round to nearest even; NaN stays NaN, what is too large
// becomes infinite.
#pragma once

#include <bit>
#include <cstdint>

namespace keyhole {

[[nodiscard]] inline float f16_to_f32(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000U) << 16U;
  const uint32_t magnitude = half & 0x7fffU;
  // The exponent bias differs by 112; the multiplication moves it and normalises subnormals as
  // well.
  const float finite = std::bit_cast<float>(magnitude << 13U) * 0x1p112F;
  const uint32_t bits =
      magnitude >= 0x7c00U ? (magnitude << 13U) | 0x7f800000U : std::bit_cast<uint32_t>(finite);
  return std::bit_cast<float>(bits | sign);
}

[[nodiscard]] inline uint16_t f32_to_f16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint16_t>((bits >> 16U) & 0x8000U);
  const uint32_t magnitude = bits & 0x7fffffffU;
  uint32_t half = 0;
  if (magnitude > 0x7f800000U) {
    half = 0x7e00U;
  } else if (magnitude >= 0x477ff000U) {  // 65520 and above round beyond the largest half, 65504
    half = 0x7c00U;
  } else if (magnitude < 0x38800000U) {
    // Below 2^-14 halves are multiples of 2^-24, which is the spacing of floats at 0.5: the
    // addition rounds to it.
    half = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5F) - 0x3f000000U;
  } else {
    const uint32_t to_even = 0xfffU + ((magnitude >> 13U) & 1U);
    half = (magnitude + to_even - 0x38000000U) >> 13U;
  }
  return static_cast<uint16_t>(half | sign);
}

[[nodiscard]] inline float bf16_to_f32(uint16_t value) {
  return std::bit_cast<float>(static_cast<uint32_t>(value) << 16U);
}

[[nodiscard]] inline uint16_t f32_to_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffU) > 0x7f800000U) return static_cast<uint16_t>((bits >> 16U) | 0x40U);
  return static_cast<uint16_t>((bits + 0x7fffU + ((bits >> 16U) & 1U)) >> 16U);
}

}  // namespace keyhole

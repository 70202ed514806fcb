// Scalar conversions between fp32 and the 16-bit formats: the reference that the SIMD ones equal bit for
// bit. Baseline code only: a unit compiled for a higher level must not include this header, because an
// inline function compiled there could be the copy that the linker keeps for the whole library.
#pragma once

#include <bit>
#include <cstdint>

namespace keyhole::cpu {

[[nodiscard]] constexpr float f16_to_f32(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000U) << 16;
  const uint32_t magnitude = h & 0x7FFFU;
  if (magnitude >= 0x7C00U) {  // Inf keeps its bits; a NaN keeps its payload and becomes quiet.
    const uint32_t quiet = magnitude > 0x7C00U ? 0x00400000U : 0U;
    return std::bit_cast<float>(sign | 0x7F800000U | (magnitude & 0x3FFU) << 13 | quiet);
  }
  if (magnitude < 0x0400U) {  // Zero and subnormals: magnitude * 2^-24 is exact in fp32.
    const float value = static_cast<float>(magnitude) * 0x1p-24F;
    return std::bit_cast<float>(std::bit_cast<uint32_t>(value) | sign);
  }
  return std::bit_cast<float>(sign | ((magnitude << 13) + ((127U - 15U) << 23)));
}

/// Rounds to nearest even; beyond 65504 (by half a step or more) gives Inf.
[[nodiscard]] constexpr uint16_t f32_to_f16(float f) {
  const uint32_t bits = std::bit_cast<uint32_t>(f);
  const uint32_t sign = bits >> 16 & 0x8000U;
  const uint32_t magnitude = bits & 0x7FFFFFFFU;
  if (magnitude > 0x7F800000U) {
    return static_cast<uint16_t>(sign | 0x7E00U | (magnitude >> 13 & 0x3FFU));
  }
  if (magnitude >= 0x477FF000U) return static_cast<uint16_t>(sign | 0x7C00U);  // >= 65520, or Inf
  if (magnitude < 0x38800000U) {
    // Below 2^-14 the result is subnormal: adding 0.5 puts its last bit at the end of fp32's mantissa,
    // so that the addition itself rounds to nearest even.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5F;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3F000000U));
  }
  const uint32_t odd = magnitude >> 13 & 1U;
  return static_cast<uint16_t>(sign | ((magnitude - ((127U - 15U) << 23) + 0xFFFU + odd) >> 13));
}

[[nodiscard]] constexpr float bf16_to_f32(uint16_t b) {
  return std::bit_cast<float>(static_cast<uint32_t>(b) << 16);
}

/// Rounds to nearest even; the largest numbers give Inf.
[[nodiscard]] constexpr uint16_t f32_to_bf16(float f) {
  const uint32_t bits = std::bit_cast<uint32_t>(f);
  if ((bits & 0x7FFFFFFFU) > 0x7F800000U) return static_cast<uint16_t>(bits >> 16 | 0x40U);
  return static_cast<uint16_t>((bits + 0x7FFFU + (bits >> 16 & 1U)) >> 16);
}

}  // namespace keyhole::cpu

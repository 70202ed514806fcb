// Conversions between fp32 and the storage types, and the check for Inf and NaN, for every level.
#pragma once

#include "cpu/simd/rows.h"

namespace keyhole::cpu {
namespace {

template <class S, DType T>
void to_f32(const std::byte* src, float* dst, size_t n) {
  size_t i = 0;
  for (; i + S::kWidth <= n; i += S::kWidth) {
    S::store_f32(dst + i, S::template load<T>(src + i * kElementSize<T>));
  }
  if (i == n) return;
  std::byte in[S::kWidth * kElementSize<T>] = {};
  float out[S::kWidth];
  __builtin_memcpy(in, src + i * kElementSize<T>, (n - i) * kElementSize<T>);
  S::store_f32(out, S::template load<T>(in));
  __builtin_memcpy(dst + i, out, (n - i) * sizeof(float));
}

template <class S>
void i8_to_f32(const std::byte* src, const uint16_t* scales, float* dst, size_t n) {
  size_t i = 0;
  for (; i + S::kWidth <= n; i += S::kWidth) {
    S::store_f32(dst + i, load_elements<S, DType::i8>(src + i, scales + i));
  }
  if (i == n) return;
  std::byte in[S::kWidth] = {};
  uint16_t in_scales[S::kWidth] = {};
  float out[S::kWidth];
  __builtin_memcpy(in, src + i, n - i);
  __builtin_memcpy(in_scales, scales + i, (n - i) * sizeof(uint16_t));
  S::store_f32(out, load_elements<S, DType::i8>(in, in_scales));
  __builtin_memcpy(dst + i, out, (n - i) * sizeof(float));
}

template <class S, DType T>
void from_f32(const float* src, std::byte* dst, size_t n) {
  size_t i = 0;
  for (; i + S::kWidth <= n; i += S::kWidth) {
    S::template store<T>(dst + i * kElementSize<T>, S::load_f32(src + i));
  }
  if (i == n) return;
  float in[S::kWidth] = {};
  std::byte out[S::kWidth * kElementSize<T>];
  __builtin_memcpy(in, src + i, (n - i) * sizeof(float));
  S::template store<T>(out, S::load_f32(in));
  __builtin_memcpy(dst + i * kElementSize<T>, out, (n - i) * kElementSize<T>);
}

template <class S, DType T>
bool all_finite(const std::byte* src, size_t n) {
  typename S::F check = S::zero();  // x - x is 0, or NaN for Inf and NaN, and a NaN stays in a sum
  size_t i = 0;
  for (; i + S::kWidth <= n; i += S::kWidth) {
    const auto x = S::template load<T>(src + i * kElementSize<T>);
    check = S::add(check, S::sub(x, x));
  }
  if (i < n) {
    std::byte rest[S::kWidth * kElementSize<T>] = {};
    __builtin_memcpy(rest, src + i * kElementSize<T>, (n - i) * kElementSize<T>);
    const auto x = S::template load<T>(rest);
    check = S::add(check, S::sub(x, x));
  }
  return S::reduce_add(check) == 0.0F;
}

}  // namespace
}  // namespace keyhole::cpu

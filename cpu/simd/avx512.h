// The vector operations that cpu/simd/ needs, in AVX-512 (F, BW, DQ, VL).
#pragma once

#include <immintrin.h>

#include "cpu/simd/polynomials.h"

namespace keyhole::cpu {
namespace {

struct Avx512 {
  using F = __m512;
  static constexpr uint32_t kWidth = 16;
  // 32 registers: 4 heads x 6 vectors of accumulators, 4 weights, and the loaded vector.
  static constexpr uint32_t kMaxValueVectors = 6;

  static F zero() { return _mm512_setzero_ps(); }
  static F set1(float x) { return _mm512_set1_ps(x); }
  static F load_f32(const float* p) { return _mm512_loadu_ps(p); }
  static void store_f32(float* p, F x) { _mm512_storeu_ps(p, x); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F fnma(F a, F b, F c) { return _mm512_fnmadd_ps(a, b, c); }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  static F min(F a, F b) { return _mm512_min_ps(a, b); }
  static F abs(F a) { return _mm512_abs_ps(a); }
  static F with_sign_of(F magnitude, F sign) {
    return _mm512_or_ps(magnitude, _mm512_and_ps(sign, _mm512_set1_ps(-0.0F)));
  }
  static F round(F a) {
    return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  static F times_power_of_two(F a, F n) { return _mm512_scalef_ps(a, n); }
  /// a < b ? x : y; a NaN gives y.
  static F less_select(F a, F b, F x, F y) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x);
  }
  /// The first n lanes of a, the others of b.
  static F first_lanes(F a, F b, size_t n) {
    const auto mask = static_cast<__mmask16>(n >= kWidth ? 0xFFFFU : (1U << n) - 1U);
    return _mm512_mask_blend_ps(mask, b, a);
  }
  /// Bit i: a[i] > b[i]; a NaN is not.
  static uint32_t greater_lanes(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
  /// Writes the lanes of `a` that `lanes` names to p, one behind the other.
  static void store_lanes(float* p, F a, uint32_t lanes) {
    // In a register and then out: a compressing store is microcode on Zen 4.
    const auto written = static_cast<__mmask16>((1U << __builtin_popcount(lanes)) - 1U);
    _mm512_mask_storeu_ps(p, written, _mm512_maskz_compress_ps(static_cast<__mmask16>(lanes), a));
  }
  static float first(F a) { return _mm512_cvtss_f32(a); }
  static float reduce_max(F a) { return _mm512_reduce_max_ps(a); }
  static float reduce_add(F a) { return _mm512_reduce_add_ps(a); }

  template <DType T>
  static F load(const std::byte* p) {
    if constexpr (T == DType::f32) {
      return _mm512_loadu_ps(p);
    } else if constexpr (T == DType::i8) {
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
      return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
    } else {
      const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
      if constexpr (T == DType::f16) return _mm512_cvtph_ps(half);
      return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
    }
  }

  /// Rounds to nearest even.
  template <DType T>
  static void store(std::byte* p, F x) {
    if constexpr (T == DType::f32) {
      _mm512_storeu_ps(p, x);
    } else if constexpr (T == DType::f16) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                          _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    } else {
      // AVX512_BF16's own conversion takes subnormals for zero, so integers do it.
      const __m512i bits = _mm512_castps_si512(x);
      const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
      const __m512i rounded =
          _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
      const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
      const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
      const __m512i result = _mm512_mask_blend_epi32(nan, rounded, quiet);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                          _mm512_cvtepi32_epi16(_mm512_srli_epi32(result, 16)));
    }
  }

  /// Lane i of the result: the sum of a[i]'s lanes.
  template <class V, class Add>
  static V reduce_each(const V (&a)[16], Add add) {
    const auto lo = [](V x, V y) { return V(_mm512_unpacklo_ps(__m512(x), __m512(y))); };
    const auto hi = [](V x, V y) { return V(_mm512_unpackhi_ps(__m512(x), __m512(y))); };
    V quads[4];  // in every 128-bit lane: partial sums of 4 inputs
    for (int j = 0; j < 4; ++j) {
      const V x = add(lo(a[4 * j], a[4 * j + 2]), hi(a[4 * j], a[4 * j + 2]));
      const V y = add(lo(a[4 * j + 1], a[4 * j + 3]), hi(a[4 * j + 1], a[4 * j + 3]));
      quads[j] = add(lo(x, y), hi(x, y));
    }
    const auto even = [](V x, V y) { return V(_mm512_shuffle_f32x4(__m512(x), __m512(y), 0x88)); };
    const auto odd = [](V x, V y) { return V(_mm512_shuffle_f32x4(__m512(x), __m512(y), 0xDD)); };
    const V front = add(even(quads[0], quads[1]), odd(quads[0], quads[1]));
    const V back = add(even(quads[2], quads[3]), odd(quads[2], quads[3]));
    return add(even(front, back), odd(front, back));
  }
  static F reduce_each(const F (&a)[16]) {
    return reduce_each(a, [](F x, F y) { return _mm512_add_ps(x, y); });
  }

  /// Writes lanes [h*n, h*n + n) to out + h*stride for h in [0, 16/n).
  template <uint32_t n>
  static void store_parts(F a, uint32_t parts, float* out, size_t stride) {
    static_assert(n == 4 || n == 8 || n == 16);
    if constexpr (n == 16) {
      _mm512_storeu_ps(out, a);
    } else if constexpr (n == 8) {
      _mm256_storeu_ps(out, _mm512_castps512_ps256(a));
      if (parts > 1) _mm256_storeu_ps(out + stride, _mm512_extractf32x8_ps(a, 1));
    } else {
      _mm_storeu_ps(out, _mm512_castps512_ps128(a));
      if (parts > 1) _mm_storeu_ps(out + stride, _mm512_extractf32x4_ps(a, 1));
      if (parts > 2) _mm_storeu_ps(out + 2 * stride, _mm512_extractf32x4_ps(a, 2));
      if (parts > 3) _mm_storeu_ps(out + 3 * stride, _mm512_extractf32x4_ps(a, 3));
    }
  }
};

/// int8 through 16-bit products: a pair sums to at most 2*127*127, exact in 32 bits.
struct Avx512Int8 : Avx512 {
  using I = __m512i;
  using Key = __m512i;
  using Query = int16_t;
  static constexpr uint32_t kChunk = 32;

  static I zero_i32() { return _mm512_setzero_si512(); }
  static I sub_i32(I a, I b) { return _mm512_sub_epi32(a, b); }
  static F to_f32(I a) { return _mm512_cvtepi32_ps(a); }
  static I reduce_each_i32(const I (&a)[16]) {
    return reduce_each(a, [](I x, I y) { return _mm512_add_epi32(x, y); });
  }
  /// p[i / n] in lane i.
  template <uint32_t n>
  static F repeat_each(const float* p) {
    return _mm512_castsi512_ps(repeat_each_i32<n>(reinterpret_cast<const int32_t*>(p)));
  }
  template <uint32_t n>
  static I repeat_each_i32(const int32_t* p) {
    const __m512i four =
        _mm512_castsi128_si512(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_permutexvar_epi32(_mm512_srli_epi32(lane, n == 4 ? 2 : n == 8 ? 3 : 4), four);
  }

  static Key load_key(const std::byte* p) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static Key load_key_part(const std::byte* p, uint32_t n) {
    return _mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8((__mmask32{1} << n) - 1, p));
  }
  static Key load_query(const Query* q) { return _mm512_loadu_si512(q); }
  static I multiply(I acc, Key key, Key query) {
    return _mm512_add_epi32(acc, _mm512_madd_epi16(key, query));
  }
  static int32_t prepare_query(const int8_t* src, uint32_t dim, Query* dst) {
    const auto* p = reinterpret_cast<const std::byte*>(src);
    for (uint32_t j = 0; j < dim; j += kChunk) {
      const uint32_t left = dim - j;
      _mm512_storeu_si512(dst + j, left >= kChunk ? load_key(p + j) : load_key_part(p + j, left));
    }
    return 0;
  }
};

}  // namespace
}  // namespace keyhole::cpu

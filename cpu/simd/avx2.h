// The vector operations that cpu/simd/ needs, in AVX2 + FMA + F16C.
#pragma once

#include <immintrin.h>

#include "cpu/simd/polynomials.h"

namespace keyhole::cpu {
namespace {

struct Avx2 {
  using F = __m256;
  static constexpr uint32_t kWidth = 8;
  // 16 registers: 4 heads x 2 vectors of accumulators, 4 weights, and the loaded vectors.
  static constexpr uint32_t kMaxValueVectors = 2;

  static F zero() { return _mm256_setzero_ps(); }
  static F set1(float x) { return _mm256_set1_ps(x); }
  static F load_f32(const float* p) { return _mm256_loadu_ps(p); }
  static void store_f32(float* p, F x) { _mm256_storeu_ps(p, x); }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F div(F a, F b) { return _mm256_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F fnma(F a, F b, F c) { return _mm256_fnmadd_ps(a, b, c); }
  static F max(F a, F b) { return _mm256_max_ps(a, b); }
  static F min(F a, F b) { return _mm256_min_ps(a, b); }
  static F abs(F a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0F), a); }
  static F with_sign_of(F magnitude, F sign) {
    return _mm256_or_ps(magnitude, _mm256_and_ps(sign, _mm256_set1_ps(-0.0F)));
  }
  static F round(F a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  /// a * 2^n for a in [0.5, 2) and integers |n| <= 125.
  static F times_power_of_two(F a, F n) {
    const __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), exponent));
  }
  /// a < b ? x : y; a NaN gives y.
  static F less_select(F a, F b, F x, F y) {
    return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
  }
  /// The first n lanes of a, the others of b (lane: one element of a register).
  static F first_lanes(F a, F b, size_t n) {
    const __m256i count = _mm256_set1_epi32(n < kWidth ? static_cast<int>(n) : 8);
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_blendv_ps(b, a, _mm256_castsi256_ps(_mm256_cmpgt_epi32(count, lane)));
  }
  /// Bit i: a[i] > b[i]; a NaN is not.
  static uint32_t greater_lanes(F a, F b) {
    return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)));
  }
  /// Writes the lanes of `a` that `lanes` names to p, one behind the other.
  static void store_lanes(float* p, F a, uint32_t lanes) {
    alignas(32) float all[kWidth];
    _mm256_store_ps(all, a);
    for (; lanes != 0; lanes &= lanes - 1) *p++ = all[__builtin_ctz(lanes)];
  }
  static float first(F a) { return _mm256_cvtss_f32(a); }
  static float reduce_max(F a) {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
  }
  static float reduce_add(F a) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
  }

  template <DType T>
  static F load(const std::byte* p) {
    if constexpr (T == DType::f32) {
      return _mm256_loadu_ps(reinterpret_cast<const float*>(p));
    } else if constexpr (T == DType::i8) {
      const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
      return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
    } else {
      const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
      if constexpr (T == DType::f16) return _mm256_cvtph_ps(half);
      return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
    }
  }

  /// Rounds to nearest even.
  template <DType T>
  static void store(std::byte* p, F x) {
    if constexpr (T == DType::f32) {
      _mm256_storeu_ps(reinterpret_cast<float*>(p), x);
    } else if constexpr (T == DType::f16) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                       _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    } else {
      const __m256i bits = _mm256_castps_si256(x);
      const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
      const __m256i rounded =
          _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd);
      const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
      const __m256 nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
      const __m256 result =
          _mm256_blendv_ps(_mm256_castsi256_ps(rounded), _mm256_castsi256_ps(quiet), nan);
      const __m256i high = _mm256_srli_epi32(_mm256_castps_si256(result), 16);
      const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0xD8);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
    }
  }

  /// Lane i of the result: the sum of a[i]'s lanes.
  template <class V, class Add>
  static V reduce_each(const V (&a)[8], Add add) {
    const auto lo = [](V x, V y) { return V(_mm256_unpacklo_ps(__m256(x), __m256(y))); };
    const auto hi = [](V x, V y) { return V(_mm256_unpackhi_ps(__m256(x), __m256(y))); };
    V quads[2];  // in both 128-bit lanes: partial sums of 4 inputs
    for (int j = 0; j < 2; ++j) {
      const V x = add(lo(a[4 * j], a[4 * j + 2]), hi(a[4 * j], a[4 * j + 2]));
      const V y = add(lo(a[4 * j + 1], a[4 * j + 3]), hi(a[4 * j + 1], a[4 * j + 3]));
      quads[j] = add(lo(x, y), hi(x, y));
    }
    const V low = V(_mm256_permute2f128_ps(__m256(quads[0]), __m256(quads[1]), 0x20));
    const V high = V(_mm256_permute2f128_ps(__m256(quads[0]), __m256(quads[1]), 0x31));
    return add(low, high);
  }
  static F reduce_each(const F (&a)[8]) {
    return reduce_each(a, [](F x, F y) { return _mm256_add_ps(x, y); });
  }

  /// Writes lanes [h*n, h*n + n) to out + h*stride for h < parts.
  template <uint32_t n>
  static void store_parts(F a, uint32_t parts, float* out, size_t stride) {
    static_assert(n == 2 || n == 4 || n == 8);
    if constexpr (n == 8) {
      _mm256_storeu_ps(out, a);
    } else {
      const __m128 low = _mm256_castps256_ps128(a);
      const __m128 high = _mm256_extractf128_ps(a, 1);
      if constexpr (n == 4) {
        _mm_storeu_ps(out, low);
        if (parts > 1) _mm_storeu_ps(out + stride, high);
      } else {
        _mm_storel_pi(reinterpret_cast<__m64*>(out), low);
        if (parts > 1) _mm_storeh_pi(reinterpret_cast<__m64*>(out + stride), low);
        if (parts > 2) _mm_storel_pi(reinterpret_cast<__m64*>(out + 2 * stride), high);
        if (parts > 3) _mm_storeh_pi(reinterpret_cast<__m64*>(out + 3 * stride), high);
      }
    }
  }
};

/// int8 through 16-bit products: a pair sums to at most 2*127*127, exact in 32 bits.
struct Avx2Int8 : Avx2 {
  using I = __m256i;
  using Key = __m256i;
  using Query = int16_t;
  static constexpr uint32_t kChunk = 16;  // divides every head_dim

  static I zero_i32() { return _mm256_setzero_si256(); }
  static I sub_i32(I a, I b) { return _mm256_sub_epi32(a, b); }
  static F to_f32(I a) { return _mm256_cvtepi32_ps(a); }
  static I reduce_each_i32(const I (&a)[8]) {
    return reduce_each(a, [](I x, I y) { return _mm256_add_epi32(x, y); });
  }
  /// p[i / n] in lane i.
  template <uint32_t n>
  static F repeat_each(const float* p) {
    return _mm256_castsi256_ps(repeat_each_i32<n>(reinterpret_cast<const int32_t*>(p)));
  }
  template <uint32_t n>
  static I repeat_each_i32(const int32_t* p) {
    const __m256i four =
        _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_permutevar8x32_epi32(four, _mm256_srli_epi32(lane, n == 2 ? 1 : n == 4 ? 2 : 3));
  }

  static Key load_key(const std::byte* p) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static Key load_key_part(const std::byte* p, uint32_t) { return load_key(p); }  // never a part
  static Key load_query(const Query* q) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(q));
  }
  static I multiply(I acc, Key key, Key query) {
    return _mm256_add_epi32(acc, _mm256_madd_epi16(key, query));
  }
  static int32_t prepare_query(const int8_t* src, uint32_t dim, Query* dst) {
    for (uint32_t j = 0; j < dim; j += kChunk) {
      const __m256i wide = load_key(reinterpret_cast<const std::byte*>(src + j));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst + j), wide);
    }
    return 0;
  }
};

}  // namespace
}  // namespace keyhole::cpu

// Integer operations of codes in AVX2.
#pragma once

#include "cpu/simd/avx2.h"
#include "cpu/simd/codes.h"

namespace keyhole::cpu {
namespace {

struct Avx2Codes {
  using Float = Avx2;
  using I = __m256i;
  static constexpr uint32_t kWords = 8;

  static I zero() { return _mm256_setzero_si256(); }
  static I set1(int32_t x) { return _mm256_set1_epi32(x); }
  static I load(const std::byte* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  static I mask(I x, uint32_t m) {
    return _mm256_and_si256(x, _mm256_set1_epi32(static_cast<int>(m)));
  }
  template <uint32_t n>
  static I shift_right(I x) {
    return _mm256_srli_epi32(x, n);
  }
  template <uint32_t n>
  static I shift_left(I x) {
    return _mm256_slli_epi32(x, n);
  }
  static I add(I a, I b) { return _mm256_add_epi32(a, b); }
  static I sub(I a, I b) { return _mm256_sub_epi32(a, b); }
  static Float::F to_f32(I x) { return _mm256_cvtepi32_ps(x); }

  /// sums[i] += sum of u[i][k] * the k-th vector of q. Pairs of products sum to 3840 at most, eight of them fit 16
  /// bits.
  template <uint32_t kSteps, uint32_t kPairs>
  [[gnu::always_inline]] static void add_products(const I (&u)[2][kSteps], const int8_t* q,
                                                  I (&sums)[2]) {
    static_assert(kPairs == 1);
#pragma GCC unroll 2
    for (uint32_t begin = 0; begin < kSteps; begin += 8) {
      I narrow[2] = {zero(), zero()};
#pragma GCC unroll 8
      for (uint32_t k = begin; k < (begin + 8 < kSteps ? begin + 8 : kSteps); ++k) {
        const I of_query = load(reinterpret_cast<const std::byte*>(q) + k * sizeof(I));
        narrow[0] = _mm256_add_epi16(narrow[0], _mm256_maddubs_epi16(u[0][k], of_query));
        narrow[1] = _mm256_add_epi16(narrow[1], _mm256_maddubs_epi16(u[1][k], of_query));
      }
      const I ones = _mm256_set1_epi16(1);
      sums[0] = _mm256_add_epi32(sums[0], _mm256_madd_epi16(narrow[0], ones));
      sums[1] = _mm256_add_epi32(sums[1], _mm256_madd_epi16(narrow[1], ones));
    }
  }

  /// Rows 0-7 and 8-15 from the products of 8 pairs, whose even places belong to the first row.
  template <uint32_t kPairs>
  static void sum_rows(const I (&a)[8], I (&rows)[2]) {
    I halves[2];  // 4 pairs each: both rows of a pair side by side
    for (int j = 0; j < 2; ++j) {
      const I x = add_pairs_of(a[4 * j], a[4 * j + 1]);
      const I y = add_pairs_of(a[4 * j + 2], a[4 * j + 3]);
      halves[j] = _mm256_add_epi32(_mm256_permute2x128_si256(x, y, 0x20),
                                   _mm256_permute2x128_si256(x, y, 0x31));
    }
    const __m256 x = _mm256_castsi256_ps(halves[0]);
    const __m256 y = _mm256_castsi256_ps(halves[1]);
    rows[0] = in_order(_mm256_shuffle_ps(x, y, 0x88));
    rows[1] = in_order(_mm256_shuffle_ps(x, y, 0xDD));
  }

  /// f (0) or g (1) of 8 rows.
  template <int which>
  static Float::F load_factors(const std::byte* p) {
    const I both = load(p);
    const I one = which == 0 ? _mm256_and_si256(both, _mm256_set1_epi32(0xFFFF))
                             : _mm256_srli_epi32(both, 16);
    const I packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(one, one), 0xD8);
    return _mm256_cvtph_ps(_mm256_castsi256_si128(packed));
  }

  /// Integers in [-32768, 32767].
  static void store_i16(int16_t* out, Float::F x) {
    const I wide = _mm256_cvtps_epi32(x);
    const I packed = _mm256_permute4x64_epi64(_mm256_packs_epi32(wide, wide), 0xD8);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm256_castsi256_si128(packed));
  }
  /// Word i: the pair order[i] of 4 pairs of weights.
  static I pick_pairs(const int16_t* weights, I order) {
    const __m128i four = _mm_loadu_si128(reinterpret_cast<const __m128i*>(weights));
    return _mm256_permutevar8x32_epi32(_mm256_broadcastsi128_si256(four), order);
  }
  static I add_pairs(I sum, I u, I weights) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(u, weights));
  }

 private:
  static I add_pairs_of(I a, I b) {
    return _mm256_add_epi32(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
  }
  static I in_order(__m256 x) { return _mm256_permute4x64_epi64(_mm256_castps_si256(x), 0xD8); }
};

}  // namespace
}  // namespace keyhole::cpu

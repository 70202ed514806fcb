// Integer operations of codes in AVX-512, without and with VNNI.
#pragma once

#include "cpu/simd/avx512.h"
#include "cpu/simd/codes.h"

namespace keyhole::cpu {
namespace {

struct Avx512Codes {
  using Float = Avx512;
  using I = __m512i;
  static constexpr uint32_t kWords = 16;

  static I zero() { return _mm512_setzero_si512(); }
  static I set1(int32_t x) { return _mm512_set1_epi32(x); }
  static I load(const std::byte* p) { return _mm512_loadu_si512(p); }
  static I mask(I x, uint32_t m) {
    return _mm512_and_si512(x, _mm512_set1_epi32(static_cast<int>(m)));
  }
  template <uint32_t n>
  static I shift_right(I x) {
    return _mm512_srli_epi32(x, n);
  }
  template <uint32_t n>
  static I shift_left(I x) {
    return _mm512_slli_epi32(x, n);
  }
  static I add(I a, I b) { return _mm512_add_epi32(a, b); }
  static I sub(I a, I b) { return _mm512_sub_epi32(a, b); }
  static Float::F to_f32(I x) { return _mm512_cvtepi32_ps(x); }

  /// The k-th vector of a query's bytes; where a vector holds two pairs, both have the same.
  template <uint32_t kPairs>
  static I load_query(const int8_t* q, uint32_t k) {
    if constexpr (kPairs == 1) return _mm512_loadu_si512(q + k * sizeof(I));
    const auto* half = reinterpret_cast<const __m256i*>(q + k * (sizeof(I) / 2));
    return _mm512_broadcast_i64x4(_mm256_loadu_si256(half));
  }

  /// As Avx2Codes::add_products().
  template <uint32_t kSteps, uint32_t kPairs>
  [[gnu::always_inline]] static void add_products(const I (&u)[2][kSteps], const int8_t* q,
                                                  I (&sums)[2]) {
    static_assert(kSteps <= 8);
    I narrow[2] = {zero(), zero()};
#pragma GCC unroll 8
    for (uint32_t k = 0; k < kSteps; ++k) {
      const I of_query = load_query<kPairs>(q, k);
      narrow[0] = _mm512_add_epi16(narrow[0], _mm512_maddubs_epi16(u[0][k], of_query));
      narrow[1] = _mm512_add_epi16(narrow[1], _mm512_maddubs_epi16(u[1][k], of_query));
    }
    const I ones = _mm512_set1_epi16(1);
    sums[0] = _mm512_add_epi32(sums[0], _mm512_madd_epi16(narrow[0], ones));
    sums[1] = _mm512_add_epi32(sums[1], _mm512_madd_epi16(narrow[1], ones));
  }

  /// Rows 0-15 from the products of 8 pairs, whose even places belong to rows 0-7.
  template <uint32_t kPairs>
  static void sum_rows(const I (&a)[8 / kPairs], I (&rows)[1]) {
    if constexpr (kPairs == 1) {
      const I front = add_quarters(add_pairs_of(a[0], a[1]), add_pairs_of(a[2], a[3]));
      const I back = add_quarters(add_pairs_of(a[4], a[5]), add_pairs_of(a[6], a[7]));
      const I order = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
      rows[0] = _mm512_permutexvar_epi32(order, add_quarters(front, back));
    } else {
      // Both halves of a vector hold a pair: 0 2 1 3 4 6 5 7.
      const I all = add_quarters(add_pairs_of(a[0], a[1]), add_pairs_of(a[2], a[3]));
      const I order = _mm512_setr_epi32(0, 4, 2, 6, 8, 12, 10, 14, 1, 5, 3, 7, 9, 13, 11, 15);
      rows[0] = _mm512_permutexvar_epi32(order, all);
    }
  }

  /// f (0) or g (1) of 16 rows.
  template <int which>
  static Float::F load_factors(const std::byte* p) {
    const I both = load(p);
    return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(which == 0 ? both : _mm512_srli_epi32(both, 16)));
  }

  static void store_i16(int16_t* out, Float::F x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out),
                        _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(x)));
  }
  static I pick_pairs(const int16_t* weights, I order) {
    const __m128i four = _mm_loadu_si128(reinterpret_cast<const __m128i*>(weights));
    return _mm512_permutexvar_epi32(order, _mm512_broadcast_i32x4(four));
  }
  static I add_pairs(I sum, I u, I weights) {
    return _mm512_add_epi32(sum, _mm512_madd_epi16(u, weights));
  }

 private:
  static I add_pairs_of(I a, I b) {
    return _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
  }
  static I add_quarters(I a, I b) {
    return _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xDD));
  }
};

#ifdef __AVX512VNNI__
/// One instruction where the others take three.
struct Avx512VnniCodes : Avx512Codes {
  template <uint32_t kSteps, uint32_t kPairs>
  [[gnu::always_inline]] static void add_products(const I (&u)[2][kSteps], const int8_t* q,
                                                  I (&sums)[2]) {
#pragma GCC unroll 8
    for (uint32_t k = 0; k < kSteps; ++k) {
      const I of_query = load_query<kPairs>(q, k);
      sums[0] = _mm512_dpbusd_epi32(sums[0], u[0][k], of_query);
      sums[1] = _mm512_dpbusd_epi32(sums[1], u[1][k], of_query);
    }
  }
  static I add_pairs(I sum, I u, I weights) { return _mm512_dpwssd_epi32(sum, u, weights); }
};
#endif

}  // namespace
}  // namespace keyhole::cpu

// Integer operations of codes in AVX2; cpu/simd/avx512_codes.h describes each.
#pragma once

#include <cstring>

#include "cpu/simd/avx2.h"
#include "cpu/simd/code_scores.h"
#include "cpu/simd/code_sums.h"

namespace keyhole::cpu {
namespace {

struct Avx2Codes {
  using Float = Avx2;
  using I = __m256i;
  static constexpr uint32_t kWords = 8;
  static constexpr bool kNarrow = true;
  static constexpr uint32_t kSums = 8;

  static I zero() { return _mm256_setzero_si256(); }
  static I set1(int32_t x) { return _mm256_set1_epi32(x); }
  static I load(const std::byte* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  static I broadcast(const int8_t* p) {
    int32_t four;
    std::memcpy(&four, p, sizeof four);
    return _mm256_set1_epi32(four);
  }
  static I mask(I x, uint32_t m) {
    return _mm256_and_si256(x, _mm256_set1_epi32(static_cast<int>(m)));
  }
  static I select(uint32_t m, I a, I b) {
    const I mask = _mm256_set1_epi32(static_cast<int>(m));
    return _mm256_or_si256(_mm256_and_si256(mask, a), _mm256_andnot_si256(mask, b));
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
  static I to_i32(Float::F x) { return _mm256_cvtps_epi32(x); }

  static I add_products_of_four(I sum, I a, const int8_t* four) {
    return _mm256_add_epi16(sum, _mm256_maddubs_epi16(a, broadcast(four)));
  }
  static I widen(I narrow) { return _mm256_madd_epi16(narrow, _mm256_set1_epi16(1)); }
  static I add_products(I sum, I a, I b) { return add(sum, widen(_mm256_maddubs_epi16(a, b))); }

  /// Word p of every row, as x[r][p]. r = 0: rows 0 8 1 9 2 10 3 11; r = 1: rows 4 12 ... 7 15.
  template <uint32_t kPlaces>
  [[gnu::always_inline]] static void transpose(const std::byte* tile, uint32_t words,
                                               I (&x)[2][kPlaces]) {
    const size_t pair_bytes = size_t{16} * words;
#pragma GCC unroll 2
    for (uint32_t r = 0; r < 2; ++r) {
      for (uint32_t e = 0; e < words / 2; ++e) {
        const std::byte* at = tile + 4 * r * pair_bytes + e * sizeof(I);
        const I a = load(at), b = load(at + pair_bytes);
        const I c = load(at + 2 * pair_bytes), d = load(at + 3 * pair_bytes);
        const I low[2] = {_mm256_unpacklo_epi64(a, b), _mm256_unpacklo_epi64(c, d)};
        const I high[2] = {_mm256_unpackhi_epi64(a, b), _mm256_unpackhi_epi64(c, d)};
        I* out = x[r] + 4 * e;
        out[0] = _mm256_permute2x128_si256(low[0], low[1], 0x20);
        out[1] = _mm256_permute2x128_si256(high[0], high[1], 0x20);
        out[2] = _mm256_permute2x128_si256(low[0], low[1], 0x31);
        out[3] = _mm256_permute2x128_si256(high[0], high[1], 0x31);
      }
    }
  }
  static void in_row_order(I (&rows)[2]) {
    const __m256 a = _mm256_castsi256_ps(rows[0]), b = _mm256_castsi256_ps(rows[1]);
    rows[0] = in_order(_mm256_shuffle_ps(a, b, 0x88));
    rows[1] = in_order(_mm256_shuffle_ps(a, b, 0xDD));
  }

  template <int which>
  static Float::F load_factors(const std::byte* p) {
    const I both = load(p);
    const I one = which == 0 ? _mm256_and_si256(both, _mm256_set1_epi32(0xFFFF))
                             : _mm256_srli_epi32(both, 16);
    const I packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(one, one), 0xD8);
    return _mm256_cvtph_ps(_mm256_castsi256_si128(packed));
  }

  static void store_low_bytes(uint8_t* out, I x) {
    const I bytes = mask(x, 0xFFU);
    const I packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(bytes, bytes), 0xD8);
    const __m128i words = _mm256_castsi256_si128(packed);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(out), _mm_packus_epi16(words, words));
  }
  static I weights_of_rows(const uint8_t* rows, I order) {
    const __m128i all = _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows));
    const __m128i fours = _mm_unpacklo_epi8(all, _mm_srli_si128(all, 8));
    return _mm256_permutevar8x32_epi32(_mm256_broadcastsi128_si256(fours), order);
  }

 private:
  static I in_order(__m256 x) { return _mm256_permute4x64_epi64(_mm256_castps_si256(x), 0xD8); }
};

}  // namespace
}  // namespace keyhole::cpu

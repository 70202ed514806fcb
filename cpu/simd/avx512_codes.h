// Integer operations of codes in AVX-512, without and with VNNI.
#pragma once

#include <cstring>

#include "cpu/simd/avx512.h"
#include "cpu/simd/code_scores.h"
#include "cpu/simd/code_sums.h"

namespace keyhole::cpu {
namespace {

struct Avx512Codes {
  using Float = Avx512;
  using I = __m512i;
  static constexpr uint32_t kWords = 16;
  static constexpr bool kNarrow = true;  // products add up in 16 bits first
  static constexpr uint32_t kSums = 16;  // sums that fit the registers beside their addends

  static I zero() { return _mm512_setzero_si512(); }
  static I set1(int32_t x) { return _mm512_set1_epi32(x); }
  static I load(const std::byte* p) { return _mm512_loadu_si512(p); }
  static I broadcast(const int8_t* p) {
    int32_t four;
    std::memcpy(&four, p, sizeof four);
    return _mm512_set1_epi32(four);
  }
  static I mask(I x, uint32_t m) {
    return _mm512_and_si512(x, _mm512_set1_epi32(static_cast<int>(m)));
  }
  /// The bits of m from a, the others from b.
  static I select(uint32_t m, I a, I b) {
    return _mm512_ternarylogic_epi32(_mm512_set1_epi32(static_cast<int>(m)), a, b, 0xCA);
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
  static I to_i32(Float::F x) { return _mm512_cvtps_epi32(x); }

  /// Adds, in 16 bits, the sums of two products of bytes: `a` is unsigned, the bytes at `four` are signed.
  static I add_products_of_four(I sum, I a, const int8_t* four) {
    return _mm512_add_epi16(sum, _mm512_maddubs_epi16(a, broadcast(four)));
  }
  static I widen(I narrow) { return _mm512_madd_epi16(narrow, _mm512_set1_epi16(1)); }
  /// Adds, in 32 bits, the sum of four products of bytes: `a` is unsigned, `b` signed.
  static I add_products(I sum, I a, I b) { return add(sum, widen(_mm512_maddubs_epi16(a, b))); }

  /// Puts word p of every row (cpu/code_kernels.h) of a tile into x[0][p], rows in the order 0 8 1 9 ... 7 15. The
  /// words p of rows i and i + 8 lie side by side in 8 bytes, so this transposes 8 such pairs by 2 `words`, an even
  /// number.
  template <uint32_t kPlaces>
  [[gnu::always_inline]] static void transpose(const std::byte* tile, uint32_t words,
                                               I (&x)[1][kPlaces]) {
    const size_t pair_bytes = size_t{16} * words;
    const uint32_t eights = words / 4;
#pragma GCC unroll 4
    for (uint32_t e = 0; e < eights; ++e) {
      I low[4], high[4];  // places 0 2 4 6 and 1 3 5 7 of two pairs
#pragma GCC unroll 4
      for (uint32_t i = 0; i < 4; ++i) {
        const std::byte* at = tile + 2 * i * pair_bytes + e * sizeof(I);
        const I a = load(at), b = load(at + pair_bytes);
        low[i] = _mm512_unpacklo_epi64(a, b);
        high[i] = _mm512_unpackhi_epi64(a, b);
      }
      I* out = x[0] + 8 * e;
      spread_quarters(low, out);
      spread_quarters(high, out + 1);
    }
    if (words % 4 == 2) {  // four places are left: two pairs to a vector
      const std::byte* rest = tile + eights * sizeof(I);
      const auto two = [&](uint32_t pair) {
        const auto half = [&](uint32_t i) {
          return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rest + i * pair_bytes));
        };
        return _mm512_inserti64x4(_mm512_castsi256_si512(half(pair)), half(pair + 2), 1);
      };
      I low[2], high[2];  // places 0 2, 1 3 of pairs 0 1, 2 3 and of pairs 4 5, 6 7
#pragma GCC unroll 2
      for (uint32_t i = 0; i < 2; ++i) {
        const I a = two(4 * i), b = two(4 * i + 1);
        low[i] = _mm512_unpacklo_epi64(a, b);
        high[i] = _mm512_unpackhi_epi64(a, b);
      }
      I* out = x[0] + 8 * eights;
      out[0] = _mm512_shuffle_i64x2(low[0], low[1], 0x88);
      out[1] = _mm512_shuffle_i64x2(high[0], high[1], 0x88);
      out[2] = _mm512_shuffle_i64x2(low[0], low[1], 0xDD);
      out[3] = _mm512_shuffle_i64x2(high[0], high[1], 0xDD);
    }
  }
  static void in_row_order(I (&rows)[1]) {
    const I order = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
    rows[0] = _mm512_permutexvar_epi32(order, rows[0]);
  }

  /// The factors f (which = 0) or g (which = 1) of 16 rows.
  template <int which>
  static Float::F load_factors(const std::byte* p) {
    const I both = load(p);
    return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(which == 0 ? both : _mm512_srli_epi32(both, 16)));
  }

  static void store_low_bytes(uint8_t* out, I x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtepi32_epi8(x));
  }
  /// The weights of rows 2p, 2p + 8, 2p + 1, 2p + 9 in word i, where p = order[i].
  static I weights_of_rows(const uint8_t* rows, I order) {
    const __m128i all = _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows));
    const __m128i fours = _mm_unpacklo_epi8(all, _mm_srli_si128(all, 8));
    return _mm512_permutexvar_epi32(order, _mm512_broadcast_i32x4(fours));
  }

 private:
  /// Takes four vectors of quarters a b c d and writes all a, all b, all c, all d to every second place of `out`.
  [[gnu::always_inline]] static void spread_quarters(const I (&v)[4], I* out) {
    const I ac[2] = {_mm512_shuffle_i64x2(v[0], v[1], 0x88),
                     _mm512_shuffle_i64x2(v[2], v[3], 0x88)};
    const I bd[2] = {_mm512_shuffle_i64x2(v[0], v[1], 0xDD),
                     _mm512_shuffle_i64x2(v[2], v[3], 0xDD)};
    out[0] = _mm512_shuffle_i64x2(ac[0], ac[1], 0x88);
    out[2] = _mm512_shuffle_i64x2(bd[0], bd[1], 0x88);
    out[4] = _mm512_shuffle_i64x2(ac[0], ac[1], 0xDD);
    out[6] = _mm512_shuffle_i64x2(bd[0], bd[1], 0xDD);
  }
};

#ifdef __AVX512VNNI__
/// AVX-512 VNNI multiplies and adds bytes in one instruction where the others take three. It is written as assembly:
/// with the intrinsic GCC 12 copies sums between registers around it and keeps some in memory.
struct Avx512VnniCodes : Avx512Codes {
  static constexpr bool kNarrow = false;
  static I add_products(I sum, I a, I b) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
  }
  static I add_products_of_four(I sum, I a, const int8_t* four) {
    struct [[gnu::packed, gnu::may_alias]] Four {
      int32_t bytes;
    };
    asm("vpdpbusd %2%{1to16%}, %1, %0"
        : "+v"(sum)
        : "v"(a), "m"(*reinterpret_cast<const Four*>(four)));
    return sum;
  }
};
#endif

}  // namespace
}  // namespace keyhole::cpu

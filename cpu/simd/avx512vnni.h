// int8 products with AVX-512 VNNI.
#pragma once

#include "cpu/simd/avx512.h"

namespace keyhole::cpu {
namespace {

/// The instruction multiplies unsigned by signed bytes: keys are shifted to [1, 255] by flipping their top
/// bit, which adds 128 * (sum of the query's elements) to every inner product.
struct Avx512VnniInt8 : Avx512Int8 {
  using Query = int8_t;
  static constexpr uint32_t kChunk = 64;

  static Key load_key(const std::byte* p) {
    return _mm512_xor_si512(_mm512_loadu_si512(p), _mm512_set1_epi8(-128));
  }
  static Key load_key_part(const std::byte* p, uint32_t n) {
    // Lanes beyond the row become 128; the query is 0 there.
    return _mm512_xor_si512(_mm512_maskz_loadu_epi8((__mmask64{1} << n) - 1, p),
                            _mm512_set1_epi8(-128));
  }
  static Key load_query(const Query* q) { return _mm512_loadu_si512(q); }
  static I multiply(I acc, Key key, Key query) { return _mm512_dpbusd_epi32(acc, key, query); }
  static int32_t prepare_query(const int8_t* src, uint32_t dim, Query* dst) {
    __m512i sum = _mm512_setzero_si512();
    for (uint32_t j = 0; j < dim; j += kChunk) {
      const uint32_t left = dim - j;
      const __mmask64 mask = left >= kChunk ? ~__mmask64{0} : (__mmask64{1} << left) - 1;
      const __m512i q = _mm512_maskz_loadu_epi8(mask, src + j);
      _mm512_storeu_si512(dst + j, q);
      sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(1), q);
    }
    return 128 * _mm512_reduce_add_epi32(sum);
  }
};

}  // namespace
}  // namespace keyhole::cpu

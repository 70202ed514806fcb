#include "bench/cpu/floors.h"

#ifdef __x86_64__

#include <immintrin.h>

namespace keyhole::bench {
namespace {

// 16-byte loads reach memory's speed as well as 64-byte ones (both wait for it).
float read_sse(const std::byte* data, size_t bytes) {
  const auto* p = reinterpret_cast<const float*>(data);
  __m128 sum[8] = {};
  for (size_t i = 0; i < bytes / sizeof(float); i += 64) {
    for (size_t j = 0; j < 16; ++j) sum[j % 8] = _mm_xor_ps(sum[j % 8], _mm_loadu_ps(p + i + 4 * j));
  }
  for (int j = 1; j < 8; ++j) sum[0] = _mm_xor_ps(sum[0], sum[j]);
  return _mm_cvtss_f32(sum[0]);
}

__attribute__((target("avx512f"))) float read_avx512(const std::byte* data, size_t bytes) {
  __m512i sum[4] = {};
  for (size_t i = 0; i < bytes; i += 256) {
    for (size_t j = 0; j < 4; ++j) {
      sum[j] = _mm512_xor_si512(sum[j], _mm512_loadu_si512(data + i + 64 * j));
    }
  }
  const __m512i all = _mm512_xor_si512(_mm512_xor_si512(sum[0], sum[1]),
                                       _mm512_xor_si512(sum[2], sum[3]));
  return _mm512_cvtss_f32(_mm512_castsi512_ps(all));
}

}  // namespace

float read_all(const std::byte* data, size_t bytes) {
  static const bool wide = __builtin_cpu_supports("avx512f");
  return wide ? read_avx512(data, bytes) : read_sse(data, bytes);
}

}  // namespace keyhole::bench

#else

#include <cstring>

namespace keyhole::bench {

float read_all(const std::byte* data, size_t bytes) {
  uint64_t sum[8] = {};
  for (size_t i = 0; i < bytes; i += sizeof sum) {
    uint64_t x[8];
    std::memcpy(x, data + i, sizeof x);
    for (int j = 0; j < 8; ++j) sum[j] ^= x[j];
  }
  for (int j = 1; j < 8; ++j) sum[0] ^= sum[j];
  return static_cast<float>(sum[0]);
}

}  // namespace keyhole::bench

#endif

#include "bench/cpu/floors.h"

#ifdef __x86_64__

#include <immintrin.h>

#define KEYHOLE_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")))

namespace keyhole::bench {
namespace {

constexpr size_t kDim = 128;

KEYHOLE_TARGET inline void prefetch(const std::byte* row, size_t bytes) {
  for (size_t offset = 0; offset < bytes; offset += 64) {
    _mm_prefetch(reinterpret_cast<const char*>(row + offset), _MM_HINT_T1);
  }
}

/// `group` is a constant of the loop: its queries stay in registers where they fit.
template <uint32_t group>
KEYHOLE_TARGET void gather_f16(const std::byte* keys, const uint32_t* ids, size_t count,
                               const float* queries, size_t ahead, float* scores) {
  for (size_t i = 0; i < count; ++i) {
    prefetch(keys + size_t{ids[i + ahead < count ? i + ahead : count - 1]} * kDim * 2, kDim * 2);
    const std::byte* row = keys + size_t{ids[i]} * kDim * 2;
    __m512 sum[group][2] = {};
#pragma GCC unroll 8
    for (size_t j = 0; j < kDim / 16; ++j) {
      const __m512 key =
          _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + j * 32)));
#pragma GCC unroll 4
      for (uint32_t h = 0; h < group; ++h) {
        const __m512 query = _mm512_loadu_ps(queries + h * kDim + j * 16);
        sum[h][j % 2] = _mm512_fmadd_ps(key, query, sum[h][j % 2]);
      }
    }
#pragma GCC unroll 4
    for (uint32_t h = 0; h < group; ++h) {
      scores[h * count + i] = _mm512_reduce_add_ps(_mm512_add_ps(sum[h][0], sum[h][1]));
    }
  }
}

template <uint32_t group>
KEYHOLE_TARGET void gather_i8(const int8_t* keys, const uint32_t* ids, size_t count,
                              const int8_t* queries, size_t ahead, float* scores) {
  const __m512i flip = _mm512_set1_epi8(-128);
  const __m512i ones = _mm512_set1_epi8(1);
  int32_t correction[group];
  __m512i query[group][2];
  for (uint32_t h = 0; h < group; ++h) {
    query[h][0] = _mm512_loadu_si512(queries + h * kDim);
    query[h][1] = _mm512_loadu_si512(queries + h * kDim + 64);
    const __m512i sum = _mm512_dpbusd_epi32(
        _mm512_dpbusd_epi32(_mm512_setzero_si512(), ones, query[h][0]), ones, query[h][1]);
    correction[h] = 128 * _mm512_reduce_add_epi32(sum);
  }
  for (size_t i = 0; i < count; ++i) {
    const size_t next = ids[i + ahead < count ? i + ahead : count - 1];
    prefetch(reinterpret_cast<const std::byte*>(keys + next * kDim), kDim);
    const int8_t* row = keys + size_t{ids[i]} * kDim;
    const __m512i low = _mm512_xor_si512(_mm512_loadu_si512(row), flip);
    const __m512i high = _mm512_xor_si512(_mm512_loadu_si512(row + 64), flip);
#pragma GCC unroll 4
    for (uint32_t h = 0; h < group; ++h) {
      const __m512i sum = _mm512_dpbusd_epi32(
          _mm512_dpbusd_epi32(_mm512_setzero_si512(), low, query[h][0]), high, query[h][1]);
      scores[h * count + i] = static_cast<float>(_mm512_reduce_add_epi32(sum) - correction[h]);
    }
  }
}

}  // namespace

bool has_gather_floors() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vnni");
}

void gather_dot_f16(const std::byte* keys, const uint32_t* ids, size_t count, const float* queries,
                    uint32_t group, size_t ahead, float* scores) {
  if (group == 1) return gather_f16<1>(keys, ids, count, queries, ahead, scores);
  gather_f16<4>(keys, ids, count, queries, ahead, scores);
}

void gather_dot_i8(const int8_t* keys, const uint32_t* ids, size_t count, const int8_t* queries,
                   uint32_t group, size_t ahead, float* scores) {
  if (group == 1) return gather_i8<1>(keys, ids, count, queries, ahead, scores);
  gather_i8<4>(keys, ids, count, queries, ahead, scores);
}

}  // namespace keyhole::bench

#else

namespace keyhole::bench {
bool has_gather_floors() { return false; }
void gather_dot_f16(const std::byte*, const uint32_t*, size_t, const float*, uint32_t, size_t,
                    float*) {}
void gather_dot_i8(const int8_t*, const uint32_t*, size_t, const int8_t*, uint32_t, size_t,
                   float*) {}
}  // namespace keyhole::bench

#endif

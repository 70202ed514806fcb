#include <cstring>

#include "bench/cpu/floors.h"

#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace keyhole::bench {
namespace {

#ifdef __x86_64__

__attribute__((target("avx512f"))) uint64_t xor_avx512(const std::byte* data, size_t bytes) {
  __m512i sum[4] = {};
  for (size_t i = 0; i < bytes; i += 256) {
    for (size_t j = 0; j < 4; ++j) {
      sum[j] = _mm512_xor_si512(sum[j], _mm512_loadu_si512(data + i + 64 * j));
    }
  }
  const __m512i low = _mm512_xor_si512(sum[0], sum[1]);
  const __m512i high = _mm512_xor_si512(sum[2], sum[3]);
  return static_cast<uint64_t>(
      _mm_cvtsi128_si64(_mm512_castsi512_si128(_mm512_xor_si512(low, high))));
}

bool has_avx512() {
  static const bool has = __builtin_cpu_supports("avx512f");
  return has;
}

#endif

/// Baseline instructions; the compiler makes 16-byte loads of it.
uint64_t xor_words(const std::byte* data, size_t bytes) {
  uint64_t sum[8] = {};
  for (size_t i = 0; i < bytes; i += sizeof sum) {
    uint64_t x[8];
    std::memcpy(x, data + i, sizeof x);
    for (int j = 0; j < 8; ++j) sum[j] ^= x[j];
  }
  for (int j = 1; j < 8; ++j) sum[0] ^= sum[j];
  return sum[0];
}

}  // namespace

uint64_t read_all(const std::byte* data, size_t bytes) {
#ifdef __x86_64__
  if (has_avx512()) return xor_avx512(data, bytes);
#endif
  return xor_words(data, bytes);
}

uint64_t gather_read(const std::byte* rows, size_t row_bytes, const uint32_t* ids, size_t count,
                     size_t ahead) {
  uint64_t sum = 0;
  for (size_t i = 0; i < count; ++i) {
    const size_t next = ids[i + ahead < count ? i + ahead : count - 1] * row_bytes;
    for (size_t offset = 0; offset < row_bytes; offset += 64) {
      __builtin_prefetch(rows + next + offset, 0, 2);
    }
    sum ^= read_all(rows + ids[i] * row_bytes, row_bytes);
  }
  return sum;
}

uint64_t gather_read(const std::byte* keys, const std::byte* values, size_t row_bytes,
                     const uint32_t* ids, size_t count, size_t ahead) {
  uint64_t sum = 0;
  for (size_t i = 0; i < count; ++i) {
    const size_t next = ids[i + ahead < count ? i + ahead : count - 1] * row_bytes;
    for (size_t offset = 0; offset < row_bytes; offset += 64) {
      __builtin_prefetch(keys + next + offset, 0, 2);
    }
    for (size_t offset = 0; offset < row_bytes; offset += 64) {
      __builtin_prefetch(values + next + offset, 0, 2);
    }
    sum ^= read_all(keys + ids[i] * row_bytes, row_bytes);
    sum ^= read_all(values + ids[i] * row_bytes, row_bytes);
  }
  return sum;
}

}  // namespace keyhole::bench

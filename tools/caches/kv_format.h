// The formats q4_0 and q8_0 as llama.cpp defines them: what KV caches of 4 and 8 bits keep of a number. Since April
// 2026 its caches turn K and V by a Walsh-Hadamard matrix before they round, and take it back in the attention
// (ggml-org/llama.cpp#21038); the plain formats are what they were before.
//
// Beside them the names of formats that keep the newest tokens in 16 bits and round several tokens together:
// aging_format.h has what those are. The functions here are of the first four.
//
// Keyhole stores none of these. They are here because people choose them who have no room for K and V in 16 bits: a row
// of K or V that goes through a format and back holds exactly the numbers that such a cache attends to.
#pragma once

#include <cstddef>
#include <cstdint>

namespace keyhole::tools {

enum class KvFormat : uint8_t {
  q8_0,
  q4_0,
  q8_0_plain,
  q4_0_plain,
  kivi2,
  kivi4,
  kvarn2,
  kvarn_k4v2,
  oscar2
};

[[nodiscard]] constexpr bool has_8_bits(KvFormat format) {
  return format == KvFormat::q8_0 || format == KvFormat::q8_0_plain;
}
[[nodiscard]] constexpr bool rotates(KvFormat format) {
  return format == KvFormat::q8_0 || format == KvFormat::q4_0;
}

/// How many numbers of a head's row share a scale.
inline constexpr uint32_t kKvFormatBlock = 32;

/// Bits per number: a block of 32 along the head dimension has one fp16 scale, then 32 numbers of 8 or 4 bits.
[[nodiscard]] constexpr double kv_format_bits(KvFormat format) {
  return (has_8_bits(format) ? 8.0 : 4.0) + 16.0 / kKvFormatBlock;
}

/// Bytes of `numbers` numbers, a multiple of 32.
[[nodiscard]] constexpr uint64_t kv_format_bytes(KvFormat format, uint64_t numbers) {
  return numbers / kKvFormatBlock *
         (has_8_bits(format) ? kKvFormatBlock + 2 : kKvFormatBlock / 2 + 2);
}

/// The numbers of a head that are turned together before they are rounded: of keys the largest power of two that
/// divides head_dim, of values 64. 0: none, in plain formats and where head_dim is no multiple of 64.
[[nodiscard]] constexpr uint32_t rotated_together(KvFormat format, uint32_t head_dim, bool values) {
  if (!rotates(format) || head_dim % 64 != 0) return 0;
  return values ? 64 : head_dim & (~head_dim + 1);
}

/// Replaces each `size` of `count` numbers by their product with the orthonormal Walsh-Hadamard matrix, which is its
/// own inverse. size: a power of two that divides count.
void walsh_hadamard(float* numbers, size_t count, uint32_t size);

/// Replaces rows `[count / head_dim, head_dim]` of keys or values by the numbers that such a cache attends to: turned,
/// passed through the format, and turned back.
void pass_rows(KvFormat format, float* rows, size_t count, uint32_t head_dim, bool values);

/// Replaces `count` numbers, a multiple of 32, by what the format gives back for them, without a turn.
///
/// q8_0: scale d = max|x| / 127; x becomes d * round(x / d), ties away from zero.
/// q4_0: scale d = m / -8, where m is the number of largest magnitude (the first of equal ones) with its sign; x
/// becomes d * (min(15, floor(x / d + 8.5)) - 8), so m itself and 15 steps towards and past zero can be held.
/// x is divided by d as fp32 and multiplied by d as fp16, as the stored scale is. A block of zeros stays zeros. A block
/// with a NaN or an infinity, or whose scale is too large for fp16, becomes NaN as a whole: no cache of these formats
/// could hold it, and a NaN shows. Any thread; allocates nothing.
void pass_through(KvFormat format, float* numbers, size_t count);

}  // namespace keyhole::tools

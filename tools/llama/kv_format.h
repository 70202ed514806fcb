// The formats q4_0 and q8_0 as llama.cpp defines them: what KV caches of 4 and 8 bits keep of a number.
//
// Keyhole stores neither. They are here because people choose them who have no room for K and V in 16 bits: a row of
// K or V that goes through a format and back holds exactly the numbers that such a cache attends to.
#pragma once

#include <cstddef>
#include <cstdint>

namespace keyhole::tools {

enum class KvFormat { q8_0, q4_0 };

/// How many numbers of a head's row share a scale.
inline constexpr uint32_t kKvFormatBlock = 32;

/// Bits per number: a block of 32 along the head dimension has one fp16 scale, then 32 numbers of 8 or 4 bits.
[[nodiscard]] constexpr double kv_format_bits(KvFormat format) {
  return (format == KvFormat::q8_0 ? 8.0 : 4.0) + 16.0 / kKvFormatBlock;
}

/// Bytes of `numbers` numbers, a multiple of 32.
[[nodiscard]] constexpr uint64_t kv_format_bytes(KvFormat format, uint64_t numbers) {
  return numbers / kKvFormatBlock *
         (format == KvFormat::q8_0 ? kKvFormatBlock + 2 : kKvFormatBlock / 2 + 2);
}

/// Replaces `count` numbers, a multiple of 32, by what the format gives back for them.
///
/// q8_0: scale d = max|x| / 127; x becomes d * round(x / d), ties away from zero.
/// q4_0: scale d = m / -8, where m is the number of largest magnitude (the first of equal ones) with its sign; x
/// becomes d * (min(15, floor(x / d + 8.5)) - 8), so m itself and 15 steps towards and past zero can be held.
/// x is divided by d as fp32 and multiplied by d as fp16, as the stored scale is. A block of zeros stays zeros. A block
/// with a NaN or an infinity, or whose scale is too large for fp16, becomes NaN as a whole: no cache of these formats
/// could hold it, and a NaN shows. Any thread; allocates nothing.
void pass_through(KvFormat format, float* numbers, size_t count);

}  // namespace keyhole::tools

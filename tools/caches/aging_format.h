// Caches that keep the newest tokens in 16 bits, and older ones in few bits that several tokens or channels share:
// which tokens those are, what they take, and what they give back.
//
// Keyhole stores none of these. A row that goes through a format and back holds exactly the numbers that such a cache
// attends to.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "tools/caches/kv_format.h"

namespace keyhole::tools {

enum class KvRows : uint8_t { keys, values };

/// Tokens [begin, end).
struct TokenRange {
  uint32_t begin = 0, end = 0;
  bool operator==(const TokenRange&) const = default;
};

/// Which tokens of a sequence are in few bits, and in how many. All others are in 16 bits.
struct AgingLayout {
  /// How keys, or values, age: whole runs of `granule` tokens behind the sink, when `recent` tokens or more have come
  /// behind them.
  struct Ages {
    uint32_t recent = 0;
    uint32_t granule = 1;
    double bits = 16.0;  ///< of a number in few bits, all steps, zero points and scales counted
  };
  uint32_t sink = 0;  ///< first tokens, which never age
  Ages keys, values;

  [[nodiscard]] const Ages& of(KvRows rows) const { return rows == KvRows::keys ? keys : values; }
  /// The tokens in few bits, of a sequence of `tokens`; empty at the sink's end where there is none. It begins at the
  /// sink's end, and never shrinks as tokens come.
  [[nodiscard]] TokenRange in_few_bits(KvRows rows, uint32_t tokens) const;
  /// The tokens, of a sequence of `tokens`, before which no row changes any more as others come.
  [[nodiscard]] uint32_t settled(uint32_t tokens) const;
  /// Mean bits of a number in few bits, over keys and values.
  [[nodiscard]] double bits() const { return (keys.bits + values.bits) / 2; }
  /// Bytes of keys and values of one KV head, rows in 16 bits included.
  [[nodiscard]] uint64_t bytes(uint32_t tokens, uint32_t head_dim) const;
};

/// One such cache, for all layers and KV heads. Immutable: any number of threads may call it.
class AgingFormat {
 public:
  explicit AgingFormat(const AgingLayout& layout) : layout_(layout) {}
  virtual ~AgingFormat() = default;
  AgingFormat(const AgingFormat&) = delete;
  AgingFormat& operator=(const AgingFormat&) = delete;

  [[nodiscard]] const AgingLayout& layout() const { return layout_; }
  /// Replaces rows `[count, head_dim]` of consecutive tokens of one head by what the cache gives back of them. A
  /// granule of keys or of values begins with the first token, and another behind the last. layer: among those without
  /// a sliding window.
  virtual void pass(uint32_t layer, uint32_t kv_head, KvRows rows, float* numbers,
                    size_t count) const = 0;

 private:
  AgingLayout layout_;
};

/// Whether the format is one of these. All others round every row by itself, when it comes (kv_format.h).
[[nodiscard]] constexpr bool ages(KvFormat format) {
  return format != KvFormat::q8_0 && format != KvFormat::q4_0 && format != KvFormat::q8_0_plain &&
         format != KvFormat::q4_0_plain;
}

/// The layout of a format that ages, for heads of head_dim numbers. Throws std::invalid_argument, which says what is
/// allowed, for a head_dim that the format cannot have.
[[nodiscard]] AgingLayout aging_layout(KvFormat format, uint32_t head_dim);

/// Makes a format that ages and needs no calibration; null for oscar2, which make_oscar() makes. Throws as
/// aging_layout().
[[nodiscard]] std::shared_ptr<const AgingFormat> make_aging_format(KvFormat format,
                                                                   uint32_t head_dim);

/// Bits of a number in few bits, of any format.
[[nodiscard]] double cache_bits(KvFormat format, uint32_t head_dim);
/// Bytes of keys and values of `heads` KV heads (of all layers together) after so many tokens, of any format.
[[nodiscard]] uint64_t cache_bytes(KvFormat format, uint32_t head_dim, uint64_t heads,
                                   uint32_t tokens);

}  // namespace keyhole::tools

// What lies where in the device memory of ListedAttention (gpu/listed.h).
#pragma once

#include <cstddef>
#include <cstdint>

#include "gpu/blocked.h"

namespace keyhole::gpu {

/// Rows of some KV heads, of which there are two lots: no more bytes, but one head at least.
inline constexpr size_t kListedLotBytes = size_t{64} << 20U;

struct ListedLayout {
  /// n new tokens, behind which there are `rows` in all. has_low: queries of another dtype than the shape's.
  ListedLayout(const BlockedShape& shape, uint32_t n, uint32_t rows, bool has_low,
               size_t lot_bytes = kListedLotBytes);

  uint32_t heads = 0;     ///< KV heads of a lot, a divisor of all
  size_t head_bytes = 0;  ///< K, or V, of a head
  uint32_t piece_rows =
      0;  ///< of a head, that come together from memory that is not pinned, or in int8
  size_t piece_bytes = 0;
  // Offsets in bytes. Queries and lse are those of a lot's query heads.
  size_t q = 0, q_low = 0, lse = 0, bad = 0;
  size_t lots = 0;    ///< `[2][K, V][heads][head_bytes]`
  size_t raw = 0;     ///< a piece in int8
  size_t scales = 0;  ///< of all offloaded rows
  size_t bytes = 0;

  /// Of lot number 0 or 1; which: 0 K, 1 V.
  [[nodiscard]] size_t head_at(uint32_t lot, uint32_t which, uint32_t head) const {
    return lots + ((size_t{lot} * 2 + which) * heads + head) * head_bytes;
  }
};

}  // namespace keyhole::gpu

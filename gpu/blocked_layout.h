// Where the parts of blocked attention's device memory lie, in bytes. Arithmetic only: planning needs no device.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gpu/blocked.h"

namespace keyhole::gpu {

/// Few tokens leave most of a device idle unless thread blocks share the rows: as many states there are of theirs, side
/// by side.
inline constexpr uint32_t kFewBlockedTokens = 64, kBlockedStates = 16;

struct BlockedLayout {
  BlockedLayout(const BlockedShape& shape, uint32_t n);

  size_t q, q_low;  ///< `[n, q_heads, head_dim]` of the dtype
  size_t o,
      sums;  ///< `[n, q_heads, head_dim]` fp32, `[n, q_heads]` float2; of few tokens kBlockedStates of them
  size_t keys, values;  ///< of the new tokens, `[kv_heads][n, head_dim]`
  size_t mask, bad;     ///< 64 words, 1 number
  size_t sinks;         ///< `[q_heads]` fp32
  // Rows of the host pass through two buffers, K and then V of piece_rows each.
  size_t pieces, piece_bytes;
  size_t scales, scale_bytes;  ///< of rows in int8, for each buffer
  size_t unpacked;             ///< of rows in int8, as large as a buffer
  size_t bytes;
  uint32_t piece_rows;  ///< a multiple of kScaleRows
};

}  // namespace keyhole::gpu

// Parameters of a step whose exact rows the host reads (Codes::serve_rows()): where it asks for them, and where they
// are put. Pointers are the device's.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gpu/exchange.h"

namespace keyhole::gpu {

struct HostRows {
  uint64_t* requests =
      nullptr;  ///< pinned, see RowExchangeLayout; null: the device reads rows itself
  const DeliveredLine* answers = nullptr;  ///< pinned, per KV head
  const std::byte* rows = nullptr;         ///< pinned, `[kv_heads, exact_rows, 2, row_bytes]`
  uint32_t* steps = nullptr;               ///< per KV head: steps that have asked; zero at first
  uint32_t request_words = 0;
  uint32_t row_bytes = 0;
  RowWaits waits;
  uint32_t layer = 0;  ///< layer of this step
};

/// The row number in a request for places beyond the last exact row.
inline constexpr uint32_t kNoRow = ~0U;

}  // namespace keyhole::gpu

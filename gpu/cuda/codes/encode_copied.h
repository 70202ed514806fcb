// Encoding of rows in memory that is not pinned: they pass through a piece of device memory, some blocks at a time.
#pragma once

#include "gpu/cuda/codes/encode.h"

namespace keyhole::gpu {

/// Device memory for rows that are about to be encoded, `[2 (K, V), kv_heads, blocks * kCodeBlock, dim]`.
struct CopiedRows {
  std::byte* data = nullptr;
  uint32_t blocks = 0;  ///< 1 or more
};

/// Enqueues launcher.launch(params) where params.keys, values and row_scales are pageable memory of the host; the
/// bits are the same. May wait for what was enqueued before. Throws Error(device_error).
void encode_copied(const EncodeLauncher& launcher, const EncodeParams& params, size_t row_bytes,
                   const CopiedRows& copied, cudaStream_t stream);

}  // namespace keyhole::gpu

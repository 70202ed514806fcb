// Encoding of rows in memory that is not pinned: by way of a piece of device memory, some blocks at a time.
#pragma once

#include "gpu/cuda/codes/encode.h"

namespace keyhole::gpu {

/// Device memory for rows that are about to be encoded, `[2 (K, V), kv_heads, blocks * kCodeBlock, dim]`.
struct CopiedRows {
  std::byte* data = nullptr;
  uint32_t blocks = 0;  ///< 1 or more
};

/// Enqueues what launcher.launch(params) does, where params.keys, values and row_scales are pageable memory of the host. May
/// wait for what was enqueued before. The bits are the same. Throws Error(device_error).
void encode_copied(const EncodeLauncher& launcher, const EncodeParams& params, size_t row_bytes,
                   const CopiedRows& copied, cudaStream_t stream);

}  // namespace keyhole::gpu

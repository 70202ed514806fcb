// Encoding of blocks of K and V on the device, straight from pinned host memory. The bits equal those of
// encode_block() of index/scan/kv_codes.h.
#pragma once

#include <cuda_runtime_api.h>

#include "cpu/code_layout.h"
#include "cpu/types.h"
#include "gpu/code_doubt.h"

namespace keyhole::gpu {

/// What to encode: blocks [first, first + count) of all KV heads of a layer. Pointers are the device's.
struct EncodeParams {
  CodeShape shape;
  DType dtype = DType::f16;
  bool staged = true;      ///< set by EncodeLauncher
  uint32_t row_bytes = 0;  ///< set by EncodeLauncher
  uint32_t part_rows = 0;  ///< set by EncodeLauncher: whose codes are made before they are packed
  uint32_t kv_heads = 0;
  uint32_t first = 0;
  uint32_t count = 0;
  const std::byte* keys =
      nullptr;  ///< row i of KV head h at h * rows_stride + i * dim * size of dtype
  const std::byte* values = nullptr;
  size_t rows_stride = 0;
  /// The scales of rows of dtype i8, `[blocks, kv_heads, 2, dim]` bf16, and where the device's copy of them goes.
  const uint16_t* row_scales = nullptr;
  uint16_t* row_scales_out = nullptr;
  const float* key_scale = nullptr;    ///< `[kv_heads, dim]`
  const float* value_scale = nullptr;  ///< `[kv_heads]`
  std::byte* blocks = nullptr;  ///< block b of KV head h at b * block_stride + h * head_stride
  size_t block_stride = 0;
  size_t head_stride = 0;
  /// Counters `[blocks, kv_heads]`, zero between launches. Null: blocks whose values fp16 cannot hold do not say so.
  uint32_t* arrivals = nullptr;
  CodeFigures* figures =
      nullptr;  ///< `[kv_heads]`, which these blocks are added to; null: not kept
};

class EncodeLauncher {
 public:
  /// Chooses kernels of the current device. Throws Error(device_error).
  EncodeLauncher(const CodeShape& shape, DType dtype);
  void launch(EncodeParams params, cudaStream_t stream) const;

 private:
  const void* kernel_;
  uint32_t row_bytes_;
  uint32_t part_rows_ = 0;
  bool staged_ = false;
  size_t shared_bytes_ = 0;
};

/// Enqueues the write *count = value.
void launch_set_count(uint32_t* count, uint32_t value, cudaStream_t stream);

}  // namespace keyhole::gpu

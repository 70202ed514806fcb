// A layer's codes and the rows that they stand for, as attention of many new tokens reads them
// (BlockedAttention::attend_codes()).
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/code_layout.h"
#include "cpu/types.h"
#include "gpu/code_doubt.h"

namespace keyhole::gpu {

/// Pointers are to memory that the device reads; they stay until what was enqueued with them has ended.
struct CodedRows {
  CodeShape code;
  uint32_t kv_heads = 0;
  uint32_t blocks = 0;  ///< of kCodeBlock rows
  const std::byte* blocks_at =
      nullptr;  ///< block b of KV head h at b * block_stride + h * head_stride; null: there are none
  size_t block_stride = 0;               ///< bytes
  size_t head_stride = 0;                ///< bytes
  const float* key_scale = nullptr;      ///< `[kv_heads, dim]` of the balanced space
  const float* value_scale = nullptr;    ///< `[kv_heads]`
  const CodeFigures* figures = nullptr;  ///< `[kv_heads]`
  // The rows themselves, in pinned host memory: row i of KV head h at h * kv_head_stride + i * row_bytes, aligned to 16
  // bytes.
  const std::byte* keys = nullptr;
  const std::byte* values = nullptr;
  size_t kv_head_stride = 0;  ///< bytes
  uint32_t row_bytes = 0;
  DType dtype = DType::f16;  ///< of the rows: f16, bf16, f32, i8
  /// Blocks that 128 query rows of a KV head attend, those whose mean keys weigh most for the mean of one of its query
  /// heads, of which two are the newest. 0, or as many as there are: all, as where there are no kernels for a choice
  /// (BlockedAttention::chooses_codes()).
  uint32_t chosen_blocks = 0;
  /// The device's copy of the scales of rows of dtype i8, `[blocks, kv_heads, 2, dim]` bf16; else null.
  const uint16_t* row_scales = nullptr;
};

}  // namespace keyhole::gpu

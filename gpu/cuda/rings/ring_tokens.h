// Tokens that come to rings in device memory and leave them, other than by a step.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "cpu/tensor_view.h"
#include "gpu/ring.h"
#include "gpu/step.h"

namespace keyhole::gpu {

/// Copies n tokens, K `[n, kv_heads, row_bytes]` and then V, from memory that the device can read to where the layer's
/// tokens first, first + 1, ... lie after the append, and makes `after` the layer's state (but for its sequence).
/// n may be 0.
struct AppendParams {
  RingShape ring;
  RingState after;
  RingState* states = nullptr;  ///< of the layer, per KV head
  std::byte* kv = nullptr;      ///< of the layer
  const std::byte* from = nullptr;
  uint32_t first = 0;
  uint32_t n = 0;
  uint32_t kv_heads = 0;
  uint32_t row_bytes = 0;  ///< of one head, a multiple of 16
};
void launch_append(const AppendParams& params, cudaStream_t stream);

/// The same from tensors in device memory, whose rows are converted; head_dim is a multiple of 4.
struct AppendTokensParams {
  RingShape ring;
  RingState after;
  RingState* states = nullptr;  ///< of the layer, per KV head
  std::byte* kv = nullptr;      ///< of the layer
  DType dtype = DType::f16;     ///< there
  TensorView k, v;
  uint32_t first = 0;  ///< of the tokens in `after`
  uint32_t n = 0;
  uint32_t kv_heads = 0;
  uint32_t head_dim = 0;
};
void launch_append_tokens(const AppendTokensParams& params, cudaStream_t stream);
/// Sets *bad, in device memory, where a number of `rows` is not finite once it is rounded to `as`; their dim is a
/// multiple of 4.
void launch_find_bad(const TensorView& rows, DType as, uint32_t* bad, cudaStream_t stream);

/// See StreamSteps::keep_newest().
struct KeepParams {
  static constexpr uint32_t kMostLayers = 1024;

  RingShape ring;
  RingState* states = nullptr;  ///< of layer 0, per KV head,
  size_t states_bytes = 0;      ///< and to the next layer's
  std::byte* kv = nullptr;      ///< of layer 0
  size_t layer_bytes = 0;
  uint32_t layers = 0;
  uint32_t kv_heads = 0;
  uint32_t row_bytes = 0;  ///< of one head, a multiple of 16
  uint32_t of = 0, kept = 0;
  uint8_t numbers[kMostDrafts] = {};           ///< `[kept]`
  uint64_t takes_part[kMostLayers / 64] = {};  ///< a bit for each layer
};
void launch_keep_newest(const KeepParams& params, cudaStream_t stream);

}  // namespace keyhole::gpu

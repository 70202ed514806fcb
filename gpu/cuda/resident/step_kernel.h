// Which kernel serves a shape, and how it is launched.
#pragma once

#include <cuda_runtime_api.h>

#include "gpu/cuda/resident/step_params.h"

namespace keyhole::gpu {

/// A kernel `(StepParams, int stages)` and the dynamic shared memory that it wants:
/// max(least, fixed + stages * stage).
struct StepKernel {
  const void* function = nullptr;
  size_t fixed_bytes = 0;
  size_t stage_bytes = 0;
  size_t least_bytes = 0;
};

/// The kernel for 16-bit and for fp32 K and V; head_dim is one of the supported ones, group at most 16.
[[nodiscard]] StepKernel step_kernel_f16(uint32_t head_dim, uint32_t group);
[[nodiscard]] StepKernel step_kernel_bf16(uint32_t head_dim, uint32_t group);
[[nodiscard]] StepKernel step_kernel_f32(uint32_t head_dim, uint32_t group);

/// How a session launches its kernel on its device.
class StepLauncher {
 public:
  /// Of the current device. Throws Error(device_error), Error(unsupported).
  explicit StepLauncher(const ResidentShape& shape);

  /// Parts that a KV head's tokens are divided into: enough blocks to fill the device.
  [[nodiscard]] uint32_t splits() const { return splits_; }
  /// Whether this device can launch ahead (launch_ahead()).
  [[nodiscard]] bool ahead() const { return ahead_; }
  /// Whether the blocks that wait for the host fit on the device together with those that they wait for. False on the
  /// smallest GPUs alone.
  [[nodiscard]] bool can_wait() const { return can_wait_; }
  void launch(StepParams params, cudaStream_t stream) const;

 private:
  StepKernel kernel_;
  uint32_t kv_heads_ = 0;
  uint32_t splits_ = 0;
  int stages_ = 0;
  size_t shared_bytes_ = 0;
  bool ahead_ = false;
  bool can_wait_ = false;
};

/// One block per KV head waits for the host (where m.wait) and merges. states: the layer's, which know the step's
/// number. ahead: as of launch_ahead().
void launch_host_merge(MergeParams m, const RingState* states, uint32_t kv_heads, bool ahead,
                       cudaStream_t stream);

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
  InputRows k, v;
  uint32_t first = 0;  ///< of the tokens in `after`
  uint32_t n = 0;
  uint32_t kv_heads = 0;
  uint32_t head_dim = 0;
};
void launch_append_tokens(const AppendTokensParams& params, cudaStream_t stream);
/// Sets *bad, in device memory, where one of `[n, heads, head_dim]` numbers is not finite once it is rounded to `as`.
void launch_find_bad(const InputRows& rows, uint32_t n, uint32_t heads, uint32_t head_dim, DType as,
                     uint32_t* bad, cudaStream_t stream);

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

/// Whether a kernel can wait for the host on this device: one is launched and must see a flag that is raised after
/// its launch. Takes some milliseconds at most. Throws Error(device_error).
[[nodiscard]] bool probe_device_wait(cudaStream_t stream);

}  // namespace keyhole::gpu

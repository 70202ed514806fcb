// The attention of one step over the tokens of a ring, those of a session or of a sliding layer: which kernel serves a
// shape, and how it is launched.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>

#include "gpu/cuda/exchange/step_params.h"

namespace keyhole::gpu {

/// A kernel `(StepParams, int stages)` and the dynamic shared memory that it wants:
/// max(least, fixed + stages * stage).
struct StepKernel {
  const void* function = nullptr;
  size_t fixed_bytes = 0;
  size_t stage_bytes = 0;
  size_t least_bytes = 0;

  /// Whether one stage fits into `most` bytes, with what the kernel declares and the runtime takes.
  [[nodiscard]] bool fits(size_t most) const {
    constexpr size_t kBeside = 2048;
    return std::max(least_bytes, fixed_bytes + stage_bytes) + kBeside <= most;
  }
};

/// The kernel for 16-bit and for fp32 K and V, in thread blocks of at most `most` bytes of shared memory: 99 KiB are
/// enough for each; head_dim is one of the supported ones, group at most 16.
[[nodiscard]] StepKernel step_kernel_f16(uint32_t head_dim, uint32_t group, size_t most);
[[nodiscard]] StepKernel step_kernel_bf16(uint32_t head_dim, uint32_t group, size_t most);
[[nodiscard]] StepKernel step_kernel_f32(uint32_t head_dim, uint32_t group, size_t most);

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

}  // namespace keyhole::gpu

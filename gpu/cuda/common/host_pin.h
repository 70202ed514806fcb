// PinnedMemory of a CUDA device.
#pragma once

#include <map>

#include "gpu/pinned_memory.h"

namespace keyhole::gpu {

class HostPin final : public PinnedMemory {
 public:
  /// For CUDA device `ordinal` (other devices see the memory as well). Throws Error(unsupported) without such a device,
  /// or where a device has other addresses for host memory than the host.
  explicit HostPin(int ordinal = 0);
  ~HostPin() override;
  HostPin(const HostPin&) = delete;
  HostPin& operator=(const HostPin&) = delete;

  void add(const std::byte* data, size_t bytes) override;
  void drop(const std::byte* from, const std::byte* to) noexcept override;
  [[nodiscard]] size_t bytes() const override { return bytes_; }

 private:
  int ordinal_;
  std::map<const std::byte*, size_t> ranges_;
  size_t bytes_ = 0;
};

}  // namespace keyhole::gpu

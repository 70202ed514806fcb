// Host memory that the device reads where it lies, as sessions see it: gpu::HostPin on a CUDA device.
#pragma once

#include <cstddef>

#include "gpu/host_pin.h"

namespace keyhole::runtime {

class PinnedMemory {
 public:
  virtual ~PinnedMemory() = default;
  /// As gpu::HostPin's functions of the same names.
  virtual void add(const std::byte* data, size_t bytes) = 0;
  virtual void drop(const std::byte* from, const std::byte* to) noexcept = 0;
  [[nodiscard]] virtual size_t bytes() const = 0;
};

class CudaPinnedMemory final : public PinnedMemory {
 public:
  /// Throws as gpu::HostPin.
  explicit CudaPinnedMemory(int ordinal) : pin_(ordinal) {}
  void add(const std::byte* data, size_t bytes) override { pin_.add(data, bytes); }
  void drop(const std::byte* from, const std::byte* to) noexcept override { pin_.drop(from, to); }
  [[nodiscard]] size_t bytes() const override { return pin_.bytes(); }

 private:
  gpu::HostPin pin_;
};

}  // namespace keyhole::runtime

// Host memory that the device may read where it lies: ranges of memory that exist already (a store that grows, say)
// are locked into physical memory and mapped into the device's address space, under the same addresses.
#pragma once

#include <cstddef>
#include <map>

namespace keyhole::gpu {

/// Alignment of a range's begin and size.
inline constexpr size_t kPinAlignment = 4096;

/// One thread at a time. The ranges' memory stays mapped, by its owner, until they are dropped; nothing that was enqueued
/// reads a range when it is. May be used while another thread records a graph.
class HostPin {
 public:
  /// For CUDA device `ordinal` (other devices see the memory as well). Throws Error(unsupported) without CUDA, without
  /// such a device, or where a device has other addresses for host memory than the host.
  explicit HostPin(int ordinal = 0);
  ~HostPin();
  HostPin(const HostPin&) = delete;
  HostPin& operator=(const HostPin&) = delete;

  /// Pins bytes [data, data + bytes), which overlap no range pinned before; neighbours stay ranges of their own. Both
  /// are multiples of kPinAlignment, else Error(invalid_argument). Throws Error: out_of_memory (too much is locked, or
  /// the system does not let this process lock so much), unsupported (the device has another address for it),
  /// device_error. Nothing of it is pinned then.
  void add(const std::byte* data, size_t bytes);
  /// Unpins all ranges that begin in [from, to); to null: at `from` or after it. Throws nothing.
  void drop(const std::byte* from, const std::byte* to = nullptr) noexcept;
  /// Of all ranges.
  [[nodiscard]] size_t bytes() const { return bytes_; }

 private:
  [[maybe_unused]] int ordinal_;
  std::map<const std::byte*, size_t> ranges_;
  size_t bytes_ = 0;
};

}  // namespace keyhole::gpu

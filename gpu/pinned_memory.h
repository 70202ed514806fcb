// Host memory that the device may read where it lies: ranges of memory that exist already (a store that grows, say)
// are locked into physical memory and mapped into the device's address space, under the same addresses.
#pragma once

#include <cstddef>

namespace keyhole::gpu {

/// Alignment of a range's begin and size.
inline constexpr size_t kPinAlignment = 4096;

/// One thread at a time. The ranges' memory stays mapped, by its owner, until they are dropped; nothing that was
/// enqueued reads a range when it is. May be used while another thread records a graph.
class PinnedMemory {
 public:
  virtual ~PinnedMemory() = default;

  /// Pins bytes [data, data + bytes), which overlap no range pinned before; neighbours stay ranges of their own. Both
  /// are multiples of kPinAlignment, else Error(invalid_argument). Throws Error: out_of_memory (too much is locked, or
  /// the system does not let this process lock so much), unsupported (the device has another address for it),
  /// device_error. Nothing of it is pinned then.
  virtual void add(const std::byte* data, size_t bytes) = 0;
  /// Unpins all ranges that begin in [from, to); to null: at `from` or after it. Throws nothing.
  virtual void drop(const std::byte* from, const std::byte* to) noexcept = 0;
  /// Of all ranges.
  [[nodiscard]] virtual size_t bytes() const = 0;
};

}  // namespace keyhole::gpu

// Device memory in pages that several owners can have in common: what copies of a session share until one of them writes.
//
// An owner has addresses of its own for all of its bytes, which never change, so kernels and captured graphs know nothing of
// pages. Where the device cannot map pages (virtual memory management of the driver's API), memory is one piece and
// nothing is shared.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

namespace keyhole::gpu {

/// Of the device that is current in all calls. Not for several threads at once.
class PagedMemory {
 public:
  /// Addresses for so many bytes (0: none), without memory. Throws Error: out_of_device_memory (also where addresses are
  /// lacking), device_error.
  explicit PagedMemory(size_t bytes);
  /// Waits for the device.
  ~PagedMemory();
  PagedMemory(const PagedMemory&) = delete;
  PagedMemory& operator=(const PagedMemory&) = delete;

  [[nodiscard]] std::byte* data() const { return data_; }
  [[nodiscard]] size_t bytes() const { return bytes_; }
  /// Bytes of a page; 0: nothing is shared.
  [[nodiscard]] size_t page() const { return page_; }
  /// Of all pages that have memory, but for those that share() brought.
  [[nodiscard]] size_t held_bytes() const;

  /// The pages that lie within [begin, end) as a whole are those of `from` from now on, where that is of the same size and
  /// has them. Returns where they begin and end: [begin, begin) where there are none. Nothing that uses the bytes is under way.
  struct Stretch {
    size_t begin, end;
  };
  Stretch share(const PagedMemory& from, size_t begin, size_t end);
  /// Whether all of [begin, end) has memory that nobody else has.
  [[nodiscard]] bool owns(size_t begin, size_t end) const;
  /// By how much own() would raise held_bytes().
  [[nodiscard]] size_t missing_bytes(size_t begin, size_t end) const;
  /// Every page of [begin, end) is this owner's alone from now on, and has the bytes that were there; without memory before, it
  /// has any bytes. Nothing that uses these pages of this owner's is under way. Throws Error(out_of_device_memory |
  /// device_error): then some pages are, the others are as before.
  void own(size_t begin, size_t end);

 private:
  struct Page;

  [[nodiscard]] bool is_own(size_t page) const;
  void map(size_t page, std::shared_ptr<Page> memory);

  std::byte* data_ = nullptr;
  size_t bytes_ = 0, page_ = 0;
  std::vector<std::shared_ptr<Page>> pages_;  ///< null: without memory
  std::vector<char> is_shared_;               ///< of pages that share() brought
};

}  // namespace keyhole::gpu

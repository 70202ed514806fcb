// Device memory in pages that several owners can share: copies of a session share pages until one of them writes.
//
// An owner has addresses of its own for all of its bytes, which never change, so kernels and captured graphs know
// nothing of pages. Where the device cannot map pages (virtual memory management of the driver's API), memory is one
// piece and nothing is shared.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

namespace keyhole::gpu {

/// One owner's memory on the device that is current in all calls. Not for several threads at once.
class PagedMemory {
 public:
  /// Takes addresses for so many bytes (0: none), without memory. Throws Error: out_of_device_memory (also where
  /// addresses are lacking), device_error.
  explicit PagedMemory(size_t bytes);
  /// Waits for the device, then frees.
  ~PagedMemory();
  PagedMemory(const PagedMemory&) = delete;
  PagedMemory& operator=(const PagedMemory&) = delete;

  [[nodiscard]] std::byte* data() const { return data_; }
  [[nodiscard]] size_t bytes() const { return bytes_; }
  /// Bytes of a page; 0: nothing is shared.
  [[nodiscard]] size_t page() const { return page_; }
  /// Bytes of all pages that have memory, without those that share() brought.
  [[nodiscard]] size_t held_bytes() const;

  /// share() takes over, from `from`, the pages that lie within [begin, end) as a whole, where `from` is of the same
  /// size and has them. It returns the stretch of bytes taken over: [begin, begin) where there is none. Nothing that
  /// uses the bytes may be under way.
  struct Stretch {
    size_t begin, end;
  };
  Stretch share(const PagedMemory& from, size_t begin, size_t end);
  /// Whether all of [begin, end) has memory that nobody else has.
  [[nodiscard]] bool owns(size_t begin, size_t end) const;
  /// The bytes by which own() would raise held_bytes().
  [[nodiscard]] size_t missing_bytes(size_t begin, size_t end) const;
  /// Makes every page of [begin, end) this owner's alone, with the bytes that were there; pages without memory before
  /// get any bytes. Nothing that uses these pages of this owner may be under way. Throws Error(out_of_device_memory |
  /// device_error): then some pages are its own, the others are as before.
  void own(size_t begin, size_t end);

 private:
  struct Page;

  [[nodiscard]] bool is_own(size_t page) const;
  void map(size_t page, std::shared_ptr<Page> memory);

  std::byte* data_ = nullptr;
  size_t bytes_ = 0, page_ = 0;
  std::vector<std::shared_ptr<Page>> pages_;  ///< null: without memory
  std::vector<char> is_shared_;               ///< whether share() brought the page
};

}  // namespace keyhole::gpu

// Host memory for the big arrays: virtual space reserved once, so that rows never move while they grow,
// touched page by page as it fills, 2 MiB pages where the kernel grants them.
#pragma once

#include <cstddef>
#include <utility>

namespace keyhole::cpu {

/// The system's page size in bytes.
[[nodiscard]] size_t page_size();

/// A reserved range of zeroed memory (anonymous mapping, no swap reserved). Pages become real when they
/// are first written. Throws Error(out_of_memory) where the range cannot be reserved.
class ReservedBuffer {
 public:
  ReservedBuffer() = default;
  /// Pages beyond the first 2 MiB are huge where the kernel grants them; `huge` = false leaves that to
  /// advise_huge().
  explicit ReservedBuffer(size_t bytes, bool huge = true);
  ~ReservedBuffer();
  ReservedBuffer(ReservedBuffer&& o) noexcept
      : data_(std::exchange(o.data_, nullptr)), bytes_(std::exchange(o.bytes_, 0)) {}
  ReservedBuffer& operator=(ReservedBuffer&& o) noexcept {
    std::swap(data_, o.data_);
    std::swap(bytes_, o.bytes_);
    return *this;
  }

  [[nodiscard]] std::byte* data() const { return data_; }
  [[nodiscard]] size_t bytes() const { return bytes_; }

  /// A buffer of the same size that begins with the first `used` bytes of this one. Throws Error(out_of_memory).
  [[nodiscard]] ReservedBuffer copy(size_t used) const;

  /// Gives the pages that lie wholly in [begin, end) back to the system; they read as zero again.
  void release(size_t begin, size_t end);

  /// Asks for huge pages in [begin, end). Only pages that are not yet touched are affected.
  void advise_huge(size_t begin, size_t end);

 private:
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace keyhole::cpu

#include "cpu/memory.h"

#include "cpu/aligned.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>

#include "cpu/types.h"

namespace keyhole::cpu {
namespace {

size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

[[noreturn]] void refuse_reservation(size_t bytes, const char* why) {
  throw Error(Status::out_of_memory,
              "cannot reserve " + std::to_string(bytes) + " bytes of address space: " + why);
}

// Bytes mapped for a buffer of `bytes`.
size_t mapped_bytes(size_t bytes) { return round_up(bytes, page_size()); }

}  // namespace

size_t page_size() {
  static const auto size = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return size;
}

ReservedBuffer::ReservedBuffer(size_t bytes, bool huge) {
  if (bytes == 0) return;
  if (bytes > SIZE_MAX / 2) refuse_reservation(bytes, "larger than any address space");
  const size_t wanted = mapped_bytes(bytes);
  // Only a range that starts on a 2 MiB boundary can hold huge pages from its first byte on.
  const size_t slack = wanted >= kHugePageBytes ? kHugePageBytes : 0;
  void* mapping = mmap(nullptr, wanted + slack, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) refuse_reservation(bytes, std::strerror(errno));

  auto* begin = static_cast<std::byte*>(mapping);
  if (slack > 0) {
    const auto address = reinterpret_cast<uintptr_t>(begin);
    const size_t before = round_up(address, kHugePageBytes) - address;
    if (before > 0) munmap(begin, before);
    begin += before;
    if (slack > before) munmap(begin + wanted, slack - before);
  }
  data_ = begin;
  bytes_ = bytes;
  // A short buffer should not cost a whole huge page.
  if (huge && bytes > kHugePageBytes) advise_huge(kHugePageBytes, bytes);
}

ReservedBuffer::~ReservedBuffer() {
  if (data_ != nullptr) munmap(data_, mapped_bytes(bytes_));
}

ReservedBuffer ReservedBuffer::copy(size_t used) const {
  ReservedBuffer other(bytes_);
  if (used > 0) std::memcpy(other.data_, data_, used);
  return other;
}

void ReservedBuffer::release(size_t begin, size_t end) {
  const size_t first = round_up(begin, page_size());
  const size_t last = end >= bytes_ ? mapped_bytes(bytes_) : end / page_size() * page_size();
  if (first < last) (void)madvise(data_ + first, last - first, MADV_DONTNEED);
}

void ReservedBuffer::advise_huge(size_t begin, size_t end) {
  const size_t first = round_up(begin, kHugePageBytes);
  const size_t last = std::min(round_up(end, page_size()), mapped_bytes(bytes_));
  // A hint: where the kernel has no huge pages, small ones serve.
  if (first < last) (void)madvise(data_ + first, last - first, MADV_HUGEPAGE);
}

void advise_huge_pages(void* memory, size_t bytes) {
  const size_t whole = bytes / kHugePageBytes * kHugePageBytes;
  if (whole != 0) (void)madvise(memory, whole, MADV_HUGEPAGE);
}

}  // namespace keyhole::cpu

// Vectors whose memory begins at a cache line, because a load of a whole line costs twice as much where it touches
// two lines. Vectors of 2 MiB and more begin at a huge page and ask for huge pages: with small pages every scattered
// read of a step walks the page tables, in a virtual machine two levels of them.
#pragma once

#include <cstddef>
#include <new>
#include <vector>

namespace keyhole::cpu {

inline constexpr size_t kHugePageBytes = size_t{2} << 20;
/// Asks the system for huge pages wherever a whole one lies in `memory`, which nothing may have touched yet.
void advise_huge_pages(void* memory, size_t bytes);

template <class T>
struct LineAllocator {
  using value_type = T;
  static constexpr std::align_val_t kLine{64};

  LineAllocator() = default;
  template <class U>
  LineAllocator(const LineAllocator<U>& /*other*/) {}  // NOLINT: what allocators must allow

  [[nodiscard]] T* allocate(size_t n) {
    const std::align_val_t alignment = alignment_of(n);
    void* const memory = ::operator new(n * sizeof(T), alignment);
    if (alignment != kLine) advise_huge_pages(memory, n * sizeof(T));
    return static_cast<T*>(memory);
  }
  void deallocate(T* p, size_t n) { ::operator delete(p, alignment_of(n)); }
  static std::align_val_t alignment_of(size_t n) {
    return n * sizeof(T) < kHugePageBytes ? kLine : std::align_val_t{kHugePageBytes};
  }

  template <class U>
  bool operator==(const LineAllocator<U>& /*other*/) const {
    return true;
  }
};

template <class T>
using LineVector = std::vector<T, LineAllocator<T>>;

}  // namespace keyhole::cpu

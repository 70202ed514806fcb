// Vectors whose memory begins a cache line: loads of a whole line cost twice as much where they meet two.
#pragma once

#include <cstddef>
#include <new>
#include <vector>

namespace keyhole::cpu {

template <class T>
struct LineAllocator {
  using value_type = T;
  static constexpr std::align_val_t kLine{64};

  LineAllocator() = default;
  template <class U>
  LineAllocator(const LineAllocator<U>& /*other*/) {}  // NOLINT: what allocators must allow

  [[nodiscard]] T* allocate(size_t n) {
    return static_cast<T*>(::operator new(n * sizeof(T), kLine));
  }
  void deallocate(T* p, size_t /*n*/) { ::operator delete(p, kLine); }
  template <class U>
  bool operator==(const LineAllocator<U>& /*other*/) const {
    return true;
  }
};

template <class T>
using LineVector = std::vector<T, LineAllocator<T>>;

}  // namespace keyhole::cpu

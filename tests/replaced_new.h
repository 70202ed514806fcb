// Replaces operator new of the program, so that a test sees every allocation: for one source of a program whose other
// sources do not include it.
#pragma once

#include <cstdlib>
#include <new>

namespace keyhole::test {

/// Called before each allocation, on its thread. The includer defines it; it may throw std::bad_alloc.
void before_allocation();

inline void* allocate(size_t n, size_t align) {
  before_allocation();
  void* p =
      align == 0 ? std::malloc(n) : std::aligned_alloc(align, (n + align - 1) / align * align);
  if (p == nullptr) throw std::bad_alloc();
  return p;
}

}  // namespace keyhole::test

// Not inlined: GCC 12 would take the malloc and free inside for a mismatched pair.
[[gnu::noinline]] void* operator new(size_t n) { return keyhole::test::allocate(n, 0); }
[[gnu::noinline]] void* operator new(size_t n, std::align_val_t align) {
  return keyhole::test::allocate(n, static_cast<size_t>(align));
}
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, size_t) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, size_t, std::align_val_t) noexcept { std::free(p); }

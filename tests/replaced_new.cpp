#include "tests/replaced_new.h"

#include <array>
#include <cstddef>
#include <cstdlib>
#include <new>

namespace keyhole::test {
namespace {

// Objects before main are made by one thread; no vector, which would allocate.
constinit std::array<void (*)(), 8> hooks{};
constinit size_t hook_count = 0;

void* allocate(size_t n, size_t align) {
  for (size_t i = 0; i < hook_count; ++i) hooks[i]();
  void* p =
      align == 0 ? std::malloc(n) : std::aligned_alloc(align, (n + align - 1) / align * align);
  if (p == nullptr) throw std::bad_alloc();
  return p;
}

void* allocate_or_null(size_t n, size_t align) noexcept {
  try {
    return allocate(n, align);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

}  // namespace

BeforeAllocation::BeforeAllocation(void (*called)()) { hooks.at(hook_count++) = called; }

}  // namespace keyhole::test

// Not inlined: GCC 12 would take the malloc and free inside for a mismatched pair.
[[gnu::noinline]] void* operator new(size_t n) { return keyhole::test::allocate(n, 0); }
[[gnu::noinline]] void* operator new(size_t n, std::align_val_t align) {
  return keyhole::test::allocate(n, static_cast<size_t>(align));
}
// These too, although the standard library's call those above: AddressSanitizer has its own, whose memory it would then
// see freed by the wrong function (std::stable_sort() asks for room in this way).
[[gnu::noinline]] void* operator new(size_t n, const std::nothrow_t& /*tag*/) noexcept {
  return keyhole::test::allocate_or_null(n, 0);
}
[[gnu::noinline]] void* operator new(size_t n, std::align_val_t align,
                                     const std::nothrow_t& /*tag*/) noexcept {
  return keyhole::test::allocate_or_null(n, static_cast<size_t>(align));
}
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, size_t) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, size_t, std::align_val_t) noexcept { std::free(p); }

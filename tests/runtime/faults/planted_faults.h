// Lets one call of the system fail, the n-th from now: an allocation through operator new, a mapping of memory, or the
// start of a thread; on whichever thread it comes. For one source of a program whose other sources do not include it.
#pragma once

#include <dlfcn.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstdint>

#include "tests/replaced_new.h"
#include "tests/sanitized.h"

namespace keyhole::test {

enum class Fault { allocation, mapping, thread };

/// The fault that is planted, and how many calls of its kind are left before it; negative: none is planted. Only calls
/// inside under_fault() count.
struct Planted {
  static inline std::atomic<bool> counts{false};
  static inline std::atomic<Fault> kind{Fault::allocation};
  static inline std::atomic<int64_t> left{-1};
  static inline std::atomic<int64_t> hits{0};

  static void plant(Fault fault, int64_t calls_before) {
    kind = fault;
    hits = 0;
    left = calls_before;
  }
  /// Returns whether the fault has come.
  static bool lift() {
    left = -1;
    return hits != 0;
  }
  /// Whether this call is to fail.
  static bool strikes(Fault fault) {
    if (!counts.load(std::memory_order_relaxed) || left.load(std::memory_order_relaxed) < 0 ||
        kind.load(std::memory_order_relaxed) != fault) {
      return false;
    }
    if (left.fetch_sub(1) != 0) return false;
    ++hits;
    return true;
  }
};

/// What `call` returns, which may meet the fault that is planted.
template <class Call>
auto under_fault(const Call& call) {
  Planted::counts = true;
  const auto result = call();
  Planted::counts = false;
  return result;
}

inline void before_allocation() {
  if (Planted::strikes(Fault::allocation)) throw std::bad_alloc();
}

}  // namespace keyhole::test

// Sanitizers have their own.
#ifndef KEYHOLE_SANITIZED
extern "C" void* mmap(void* at, size_t n, int prot, int flags, int fd, off_t offset) noexcept {
  if (keyhole::test::Planted::strikes(keyhole::test::Fault::mapping)) {
    errno = ENOMEM;
    return MAP_FAILED;
  }
  return reinterpret_cast<void*>(syscall(SYS_mmap, at, n, prot, flags, fd, offset));
}
extern "C" void* mremap(void* at, size_t n, size_t n_then, int flags, ...) noexcept {
  if (keyhole::test::Planted::strikes(keyhole::test::Fault::mapping)) {
    errno = ENOMEM;
    return MAP_FAILED;
  }
  va_list more;
  va_start(more, flags);
  void* const to = va_arg(more, void*);
  va_end(more);
  return reinterpret_cast<void*>(syscall(SYS_mremap, at, n, n_then, flags, to));
}
extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes,
                              void* (*start)(void*), void* argument) noexcept {
  using Create = int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  static const auto create = reinterpret_cast<Create>(dlsym(RTLD_NEXT, "pthread_create"));
  if (keyhole::test::Planted::strikes(keyhole::test::Fault::thread)) return EAGAIN;
  return create(thread, attributes, start, argument);
}
#endif

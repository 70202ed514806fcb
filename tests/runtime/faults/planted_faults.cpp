#include "tests/runtime/faults/planted_faults.h"

#include <dlfcn.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdarg>
#include <new>

#include "tests/replaced_new.h"

namespace keyhole::test {
namespace {

const BeforeAllocation hook([] {
  if (Planted::strikes(Fault::allocation)) throw std::bad_alloc();
});

}  // namespace
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

// The C boundary: exceptions become a status and a text, and nothing else gets through.
#pragma once

#include <atomic>
#include <functional>
#include <new>
#include <string>

#include "cpu/types.h"
#include "keyhole/keyhole.h"

namespace keyhole::runtime {

/// Keeps the thread's last error text (keyhole_last_error); never throws.
keyhole_status fail(Status status, const char* text) noexcept;

/// Runs `body` and translates what it throws.
template <class F>
keyhole_status guarded(F&& body) noexcept {
  try {
    body();
    return KEYHOLE_OK;
  } catch (const Error& e) {
    return fail(e.status(), e.what());
  } catch (const std::bad_alloc&) {
    return fail(Status::out_of_memory, "host memory is exhausted");
  } catch (const std::exception& e) {
    return fail(Status::internal, e.what());
  } catch (...) {
    return fail(Status::internal, "unknown exception");
  }
}

/// Marks an object as in use for the length of a call; throws Error(busy) if another call is inside
/// it.
class UseLock {
 public:
  UseLock(std::atomic<bool>& flag, const char* what) : flag_(&flag) {
    if (flag.exchange(true, std::memory_order_acquire)) {
      throw Error(Status::busy, std::string(what) + " is in use by another thread");
    }
  }
  ~UseLock() { flag_->store(false, std::memory_order_release); }
  UseLock(const UseLock&) = delete;
  UseLock& operator=(const UseLock&) = delete;

 private:
  std::atomic<bool>* flag_;
};

/// Throws Error(invalid_argument) "NAME is NULL".
void require(const void* p, const char* name);

/// Throws Error(unsupported): NAME was made before this process was forked.
[[noreturn]] void refuse_child(const char* name);

/// The same of an object that has threads, or shares them: of this process.
template <class Handle>
requires requires(const Handle& h) { h.home.is_here(); }
void require(const Handle* handle, const char* name) {
  require(static_cast<const void*>(handle), name);
  if (!handle->home.is_here()) refuse_child(name);
}

/// Deletes an object. One of the process that this was forked from is left as it lies: its threads are not here to be
/// joined, and what it has on a device is the parent's.
template <class Handle>
void destroy(Handle* handle) {
  if (handle != nullptr && handle->home.is_here()) delete handle;
}

/// The callback of a long call as a function; empty for NULL.
[[nodiscard]] std::function<bool(double, const char*)> progress_function(keyhole_progress_fn fn,
                                                                         void* user);

}  // namespace keyhole::runtime

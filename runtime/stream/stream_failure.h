// Why a session takes no more stream steps: the first error among them.
#pragma once

#include <atomic>
#include <mutex>
#include <string>

#include "cpu/types.h"

namespace keyhole::runtime {

/// Set by the serving thread or by a call, read by both. Only the first error is kept.
class StreamFailure {
 public:
  void set(Status status, const std::string& text) {
    const std::lock_guard lock(mutex_);
    if (failed_.load(std::memory_order_relaxed)) return;
    status_ = status;
    text_ = text;
    failed_.store(true, std::memory_order_release);
  }
  [[nodiscard]] explicit operator bool() const { return failed_.load(std::memory_order_acquire); }
  /// Throws the error as an Error; does nothing without one.
  void rethrow() const {
    if (!*this) return;
    const std::lock_guard lock(mutex_);
    throw Error(status_, text_);
  }

 private:
  mutable std::mutex mutex_;
  std::atomic<bool> failed_{false};
  Status status_ = Status::ok;
  std::string text_;
};

}  // namespace keyhole::runtime

// The process that an object with threads belongs to. A child of fork(2) has a copy of the object's memory but none
// of its threads, and locks that other threads held at that moment stay locked in it: waiting for either would never
// end.
#pragma once

#include <cstdint>

namespace keyhole::cpu {

/// Remembers the process in which it was made.
class HomeProcess {
 public:
  HomeProcess() noexcept;
  /// Whether the calling process is the one in which it was made. It costs one load, because every call asks.
  [[nodiscard]] bool is_here() const noexcept;

 private:
  uint64_t forks_;
};

}  // namespace keyhole::cpu

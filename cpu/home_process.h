// Which process an object with threads belongs to. A child of fork(2) has a copy of the object's memory but none of its threads,
// and locks that other threads held at that moment stay locked: whoever waits for either waits for ever.
#pragma once

#include <cstdint>

namespace keyhole::cpu {

/// The process in which it was made.
class HomeProcess {
 public:
  HomeProcess() noexcept;
  /// Whether this is that process: one load, as every call asks.
  [[nodiscard]] bool is_here() const noexcept;

 private:
  uint64_t forks_;
};

}  // namespace keyhole::cpu

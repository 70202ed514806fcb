// Lets one call of the system fail, the n-th from now: an allocation through operator new, a mapping of memory, or
// the start of a thread, on whichever thread it comes. For programs that link planted_faults.cpp and
// replaced_new.cpp.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

namespace keyhole::test {

enum class Fault { allocation, mapping, thread };

/// The planted fault, and how many calls of its kind come before it; negative: none is planted. Only calls inside
/// under_fault() count.
struct Planted {
  static inline std::atomic<bool> counts{false};
  static inline std::atomic<Fault> kind{Fault::allocation};
  static inline std::atomic<int64_t> left{-1};
  static inline std::atomic<int64_t> hits{0};
  /// The thread whose calls count; none: those of all do.
  static inline std::atomic<std::thread::id> only{};

  static void plant(Fault fault, int64_t calls_before) {
    kind = fault;
    only = std::thread::id();
    hits = 0;
    left = calls_before;
  }
  /// A fault of the calling thread: the tests' devices have threads, too, whose allocations are not the library's.
  static void plant_here(Fault fault, int64_t calls_before) {
    kind = fault;
    only = std::this_thread::get_id();
    hits = 0;
    left = calls_before;
  }
  /// Takes the fault back; returns whether it has come.
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
    const std::thread::id thread = only.load(std::memory_order_relaxed);
    if (thread != std::thread::id() && thread != std::this_thread::get_id()) return false;
    if (left.fetch_sub(1) != 0) return false;
    ++hits;
    return true;
  }
};

/// Runs `call`, which may meet the planted fault, and returns its result.
template <class Call>
auto under_fault(const Call& call) {
  Planted::counts = true;
  const auto result = call();
  Planted::counts = false;
  return result;
}

}  // namespace keyhole::test

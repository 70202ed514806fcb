#include "cpu/home_process.h"

#include <pthread.h>

#include <atomic>

namespace keyhole::cpu {
namespace {

/// Forks between this process and the one that loaded the library. Raised in each child before anything else runs
/// there; a question to the system, getpid(), would cost every call some 100 ns.
std::atomic<uint64_t> forks_so_far{0};

void count_fork() { forks_so_far.fetch_add(1, std::memory_order_relaxed); }

// Fails where memory is exhausted as the library is loaded: then children are not told from their parents.
[[maybe_unused]] const int kIsCounting = pthread_atfork(nullptr, nullptr, count_fork);

}  // namespace

HomeProcess::HomeProcess() noexcept : forks_(forks_so_far.load(std::memory_order_relaxed)) {}

bool HomeProcess::is_here() const noexcept {
  return forks_ == forks_so_far.load(std::memory_order_relaxed);
}

}  // namespace keyhole::cpu

#include "tools/commands/bench_step/busy.h"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <utility>

#include "tools/terminal/units.h"

namespace keyhole::tools {
namespace {

// A thread looks for its end, and counts, after this many bytes: some 10 us.
constexpr size_t kPiece = size_t{64} << 10U;

/// A number of a file, UINT64_MAX where there is none: no file, or "max".
uint64_t number_in(const char* path) {
  uint64_t number = 0;
  return std::ifstream(path) >> number ? number : UINT64_MAX;
}

/// What a control group leaves; UINT64_MAX where it has no limit.
uint64_t left_of_group(const char* limit, const char* used) {
  const uint64_t most = number_in(limit), now = number_in(used);
  if (most == UINT64_MAX || now == UINT64_MAX) return UINT64_MAX;
  return most > now ? most - now : 0;
}

}  // namespace

uint64_t available_memory() {
  constexpr uint64_t kKib = 1024;
  uint64_t available = UINT64_MAX;
  std::ifstream file("/proc/meminfo");
  for (std::string name; file >> name; file.ignore(kKib, '\n')) {
    if (name == "MemAvailable:" && file >> available) {
      available *= kKib;
      break;
    }
  }
  available = std::min(available,
                       left_of_group("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"));
  return std::min(available, left_of_group("/sys/fs/cgroup/memory/memory.limit_in_bytes",
                                           "/sys/fs/cgroup/memory/memory.usage_in_bytes"));
}

std::string busy_refusal(uint32_t threads, uint64_t available) {
  constexpr uint64_t kOfThread = 2 * kBusyBlock;
  if (threads <= available / kOfThread) return {};
  return "--busy " + std::to_string(threads) + " takes " + format_bytes(threads * kOfThread) +
         ", " + format_bytes(kOfThread) + " a thread, and " + format_bytes(available) +
         " are free; allowed: up to " + std::to_string(available / kOfThread) + " threads";
}

BusyThreads::BusyThreads(uint32_t threads, size_t block_bytes) {
  threads_.reserve(threads);
  try {
    for (uint32_t i = 0; i < threads; ++i) {
      // Here, where an exception has somebody to catch it; the thread is the first to touch them.
      Blocks blocks{std::unique_ptr<char[]>(new char[block_bytes]),
                    std::unique_ptr<char[]>(new char[block_bytes])};
      threads_.emplace_back([this, block_bytes, own = std::move(blocks)]() mutable {
        copy_until_stopped(std::move(own), block_bytes);
      });
    }
  } catch (...) {
    join();
    throw;
  }
  for (uint32_t warm = warm_; warm < threads; warm = warm_) warm_.wait(warm);
  bytes_at_start_ = bytes_;
  start_ = Clock::now();
}

BusyThreads::~BusyThreads() { (void)stop(); }

double BusyThreads::stop() {
  if (threads_.empty()) return bandwidth_;
  bandwidth_ = static_cast<double>(bytes_ - bytes_at_start_) / seconds_since(start_);
  join();
  return bandwidth_;
}

void BusyThreads::join() {
  stop_ = true;
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

void BusyThreads::copy_until_stopped(Blocks blocks, size_t block_bytes) {
  std::memset(blocks.from.get(), 1, block_bytes);
  for (bool warm = false; !stop_;) {
    for (size_t at = 0; at < block_bytes && !stop_; at += kPiece) {
      const size_t n = std::min(kPiece, block_bytes - at);
      std::memcpy(blocks.to.get() + at, blocks.from.get() + at, n);
      bytes_.fetch_add(2 * n, std::memory_order_relaxed);
    }
    if (!warm) {
      warm = true;
      ++warm_;
      warm_.notify_all();
    }
  }
}

}  // namespace keyhole::tools

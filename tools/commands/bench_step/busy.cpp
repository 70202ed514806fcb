#include "tools/commands/bench_step/busy.h"

#include <algorithm>
#include <cstring>

namespace keyhole::tools {
namespace {

// A thread looks for its end, and counts, after this many bytes: some 10 us.
constexpr size_t kPiece = size_t{64} << 10U;

}  // namespace

BusyThreads::BusyThreads(uint32_t threads, size_t block_bytes) {
  threads_.reserve(threads);
  for (uint32_t i = 0; i < threads; ++i) {
    threads_.emplace_back([this, block_bytes] { copy_until_stopped(block_bytes); });
  }
  for (uint32_t warm = warm_; warm < threads; warm = warm_) warm_.wait(warm);
  bytes_at_start_ = bytes_;
  start_ = Clock::now();
}

BusyThreads::~BusyThreads() { (void)stop(); }

double BusyThreads::stop() {
  if (threads_.empty()) return bandwidth_;
  bandwidth_ = static_cast<double>(bytes_ - bytes_at_start_) / seconds_since(start_);
  stop_ = true;
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
  return bandwidth_;
}

void BusyThreads::copy_until_stopped(size_t block_bytes) {
  const std::vector<char> from(block_bytes, 1);
  std::vector<char> to(block_bytes);
  for (bool warm = false; !stop_;) {
    for (size_t at = 0; at < block_bytes && !stop_; at += kPiece) {
      const size_t n = std::min(kPiece, block_bytes - at);
      std::memcpy(to.data() + at, from.data() + at, n);
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

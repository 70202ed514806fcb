#include "tools/llama/team.h"

#include <algorithm>

namespace keyhole::tools {

Team::Team(unsigned threads) {
  if (threads == 0) threads = std::thread::hardware_concurrency();
  threads = std::clamp(threads, 1U, 64U);
  threads_.reserve(threads - 1);
  for (unsigned member = 1; member < threads; ++member) {
    threads_.emplace_back([this, member] { worker(member); });
  }
}

Team::~Team() {
  stop_.store(true, std::memory_order_relaxed);
  round_.fetch_add(1, std::memory_order_release);
  round_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void Team::run(const Work& work) {
  work_ = work;
  next_.store(0, std::memory_order_relaxed);
  if (threads_.empty() || work.count <= 1) {
    take_items(0);
    return;
  }
  inside_.store(0, std::memory_order_release);  // opens the round: publishes work_ and next_
  round_.fetch_add(1, std::memory_order_release);
  round_.notify_all();
  try {
    take_items(0);
  } catch (...) {
    next_.store(work.count, std::memory_order_relaxed);
    close();  // workers still use what the caller is about to unwind
    throw;
  }
  close();
}

void Team::take_items(unsigned member) {
  for (size_t item = next_.fetch_add(1, std::memory_order_relaxed); item < work_.count;
       item = next_.fetch_add(1, std::memory_order_relaxed)) {
    work_.call(work_.context, item, member);
  }
}

/// Lets no more workers in and waits for those inside.
void Team::close() {
  uint32_t inside = inside_.fetch_or(kClosed, std::memory_order_acq_rel) | kClosed;
  while (inside != kClosed) {
    inside_.wait(inside, std::memory_order_acquire);
    inside = inside_.load(std::memory_order_acquire);
  }
}

void Team::worker(unsigned member) {
  uint32_t seen = 0;
  while (true) {
    round_.wait(seen, std::memory_order_acquire);
    if (stop_.load(std::memory_order_relaxed)) return;
    seen = round_.load(std::memory_order_acquire);
    // Enter unless the round is over already; then the round that is now under way may be entered.
    uint32_t inside = inside_.load(std::memory_order_relaxed);
    while ((inside & kClosed) == 0 &&
           !inside_.compare_exchange_weak(inside, inside + 1, std::memory_order_acquire)) {
    }
    if ((inside & kClosed) != 0) continue;
    take_items(member);
    if (inside_.fetch_sub(1, std::memory_order_acq_rel) == (kClosed | 1)) inside_.notify_one();
  }
}

}  // namespace keyhole::tools

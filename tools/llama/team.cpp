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
  still_busy_.store(static_cast<uint32_t>(threads_.size()), std::memory_order_relaxed);
  round_.fetch_add(1, std::memory_order_release);  // publishes work_, next_ and still_busy_
  round_.notify_all();
  try {
    take_items(0);
  } catch (...) {
    next_.store(work.count, std::memory_order_relaxed);
    wait_for_workers();  // they still use what the caller is about to unwind
    throw;
  }
  wait_for_workers();
}

void Team::wait_for_workers() {
  for (uint32_t busy = still_busy_.load(std::memory_order_acquire); busy != 0;
       busy = still_busy_.load(std::memory_order_acquire)) {
    still_busy_.wait(busy, std::memory_order_acquire);
  }
}

void Team::take_items(unsigned member) {
  for (size_t item = next_.fetch_add(1, std::memory_order_relaxed); item < work_.count;
       item = next_.fetch_add(1, std::memory_order_relaxed)) {
    work_.call(work_.context, item, member);
  }
}

void Team::worker(unsigned member) {
  for (uint32_t seen = 0;; ++seen) {
    // Every round is waited for by run() before the next begins, so none can be missed.
    round_.wait(seen, std::memory_order_acquire);
    if (stop_.load(std::memory_order_relaxed)) return;
    take_items(member);
    if (still_busy_.fetch_sub(1, std::memory_order_acq_rel) == 1) still_busy_.notify_one();
  }
}

}  // namespace keyhole::tools

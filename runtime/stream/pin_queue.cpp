#include "runtime/stream/pin_queue.h"

#include <algorithm>
#include <string>
#include <system_error>

#include "cpu/types.h"

namespace keyhole::runtime {

PinQueue::~PinQueue() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

uint64_t PinQueue::add(std::vector<Range> ranges) {
  if (!thread_.joinable()) {
    try {
      thread_ = std::thread([this] { work(); });
    } catch (const std::system_error& e) {
      throw Error(Status::out_of_memory,
                  std::string("a thread that pins host memory cannot be started: ") + e.what());
    }
  }
  uint64_t number = 0;
  {
    const std::lock_guard lock(mutex_);
    number = next_;
    queue_.push_back({number, std::move(ranges)});
    next_ += 1;
    publish();
  }
  changed_.notify_all();
  return number;
}

void PinQueue::wait(uint64_t batch) {
  if (is_pinned(batch)) return;
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return is_pinned(batch) || failure_ != nullptr; });
  if (!is_pinned(batch)) std::rethrow_exception(failure_);
}

void PinQueue::check(uint64_t last) const {
  const std::lock_guard lock(mutex_);
  if (failure_ != nullptr && queue_.front().number <= last) std::rethrow_exception(failure_);
}

void PinQueue::resume() {
  {
    const std::lock_guard lock(mutex_);
    failure_ = nullptr;
  }
  changed_.notify_all();
}

void PinQueue::drop(uint64_t batch, const std::vector<Range>& ranges) noexcept {
  size_t pinned = ranges.size();
  {
    std::unique_lock lock(mutex_);
    is_held_ = true;  // the next range may need what this batch gives back
    const auto at = std::find_if(queue_.begin(), queue_.end(),
                                 [&](const Batch& b) { return b.number == batch; });
    if (at == queue_.begin() && at != queue_.end() && is_working_) {
      changed_.wait(lock, [this] { return !is_working_; });
    }
    // The range under way may have been its last.
    const auto still = std::find_if(queue_.begin(), queue_.end(),
                                    [&](const Batch& b) { return b.number == batch; });
    if (still != queue_.end()) {
      pinned = still->pinned;
      if (still == queue_.begin()) failure_ = nullptr;
      queue_.erase(still);
      publish();
    }
  }
  unpin(ranges, pinned);
  {
    const std::lock_guard lock(mutex_);
    is_held_ = false;
  }
  changed_.notify_all();
}

void PinQueue::unpin(const std::vector<Range>& ranges, size_t count) noexcept {
  const std::lock_guard lock(memory_mutex_);
  for (size_t i = 0; i < count; ++i)
    memory_->drop(ranges[i].data, ranges[i].data + ranges[i].bytes);
  bytes_ = memory_->bytes();
}

void PinQueue::publish() {
  first_.store(queue_.empty() ? next_ : queue_.front().number, std::memory_order_release);
}

void PinQueue::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(
        lock, [this] { return ends_ || (!queue_.empty() && failure_ == nullptr && !is_held_); });
    if (ends_) return;
    const Range range = queue_.front().ranges[queue_.front().pinned];
    is_working_ = true;
    lock.unlock();
    std::exception_ptr failure;
    try {
      const std::lock_guard memory(memory_mutex_);
      memory_->add(range.data, range.bytes);
      bytes_ = memory_->bytes();
    } catch (...) {
      failure = std::current_exception();
    }
    lock.lock();
    is_working_ = false;
    if (failure != nullptr) {
      failure_ = failure;
    } else if (++queue_.front().pinned == queue_.front().ranges.size()) {
      queue_.pop_front();
      publish();
    }
    changed_.notify_all();
  }
}

}  // namespace keyhole::runtime

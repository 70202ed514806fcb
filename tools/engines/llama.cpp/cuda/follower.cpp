#include "tools/engines/llama.cpp/cuda/follower.h"

#include <algorithm>
#include <exception>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace keyhole::llama_cpp {

Follower::~Follower() {
  drop();
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void Follower::take(std::vector<Following> work) {
  {
    const std::lock_guard lock(mutex_);
    tell();
    if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
    for (Following& each : work) {
      const auto old = std::find_if(waiting_.begin(), waiting_.end(), [&](const Following& waits) {
        return waits.session == each.session;
      });
      if (old != waiting_.end()) {
        *old = std::move(each);
      } else {
        waiting_.push_back(std::move(each));
      }
    }
  }
  changed_.notify_all();
}

void Follower::finish() {
  std::unique_lock lock(mutex_);
  wait(lock);
  tell();
}

void Follower::drop() {
  std::unique_lock lock(mutex_);
  waiting_.clear();
  wait(lock);
  failure_.reset();
}

void Follower::wait(std::unique_lock<std::mutex>& lock) {
  changed_.wait(lock, [&] { return waiting_.empty() && !is_busy_; });
}

/// Throws what has failed, once.
void Follower::tell() {
  if (!failure_) return;
  const std::string why = *std::exchange(failure_, std::nullopt);
  throw std::runtime_error(why);
}

void Follower::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return ends_ || !waiting_.empty(); });
    if (ends_) return;
    const Following next = std::move(waiting_.front());
    waiting_.pop_front();
    is_busy_ = true;
    lock.unlock();
    std::optional<std::string> failure;
    try {
      bring_(next);
    } catch (const std::exception& error) {
      failure = error.what();
    }
    lock.lock();
    is_busy_ = false;
    if (failure) {
      failure_ = std::move(failure);
      waiting_.clear();
    }
    changed_.notify_all();
  }
}

}  // namespace keyhole::llama_cpp

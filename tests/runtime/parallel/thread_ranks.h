// Ranks that are threads of one process: a transport in memory, in which a rank can be killed or slowed down.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "keyhole/parallel.h"

namespace keyhole::test {

class ThreadRanks {
 public:
  explicit ThreadRanks(uint32_t size) : size_(size), parts_(size) {}

  /// The transport of one rank, which leaves when it is released.
  [[nodiscard]] keyhole_transport transport(uint32_t rank) {
    keyhole_transport t;
    keyhole_transport_init(&t);
    t.context = new End{this, rank};
    t.rank = rank;
    t.size = size_;
    t.all_gather = [](void* context, const void* own, void* all, size_t bytes, uint32_t timeout_ms,
                      char* text) {
      auto* end = static_cast<End*>(context);
      return end->ranks->gather(*end, own, all, bytes, timeout_ms, text);
    };
    t.release = [](void* context) { delete static_cast<End*>(context); };
    return t;
  }

  /// Makes the rank fail to come from its n-th message on (0: the first). Ranks that wait for a dead one see their
  /// timeouts end at once: those of the living may be so long that no machine is too slow for them.
  void kill_at(uint32_t rank, uint32_t message) {
    const std::lock_guard lock(mutex_);
    killed_rank_ = rank;
    killed_at_ = message;
  }

  /// Ends all waiting, now and later: messages end in an error.
  void abort() {
    const std::lock_guard lock(mutex_);
    is_aborted_ = true;
    changed_.notify_all();
  }

  /// Runs f(rank) on a thread for each rank.
  void run(const std::function<void(uint32_t)>& f) const {
    std::vector<std::thread> threads;
    for (uint32_t r = 0; r < size_; ++r) threads.emplace_back(f, r);
    for (std::thread& thread : threads) thread.join();
  }
  [[nodiscard]] uint32_t size() const { return size_; }

 private:
  struct End {
    ThreadRanks* ranks;
    uint32_t rank;
    uint32_t messages = 0;
  };

  keyhole_status gather(End& own_end, const void* own, void* all, size_t bytes, uint32_t timeout_ms,
                        char* text) {
    std::unique_lock lock(mutex_);
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
    const auto fail = [&](keyhole_status status, const char* why) {
      std::snprintf(text, KEYHOLE_TRANSPORT_TEXT, "%s", why);
      return status;
    };
    const uint32_t rank = own_end.rank;
    if (rank == killed_rank_ && own_end.messages >= killed_at_) {
      is_one_dead_ = true;
      changed_.notify_all();
      return fail(KEYHOLE_RANK_FAILED, "killed by the test");
    }
    const uint64_t number = own_end.messages++;
    parts_[rank].assign(static_cast<const char*>(own), static_cast<const char*>(own) + bytes);
    if (++come_ == size_) {
      // A rank that is a round behind has a place of its own. Two places are enough, because no rank is two rounds
      // ahead.
      whole_[number % 2] = parts_;
      come_ = 0;
      ++rounds_;
      changed_.notify_all();
    } else {
      changed_.wait_until(lock, end,
                          [&] { return rounds_ > number || is_aborted_ || is_one_dead_; });
    }
    if (is_aborted_) return fail(KEYHOLE_RANK_FAILED, "aborted");
    if (rounds_ <= number) return fail(KEYHOLE_TIMEOUT, "the others did not come");
    for (uint32_t r = 0; r < size_; ++r) {
      const std::vector<char>& part = whole_[number % 2][r];
      if (part.size() != bytes) return fail(KEYHOLE_RANK_FAILED, "messages of different lengths");
      std::memcpy(static_cast<char*>(all) + r * bytes, part.data(), bytes);
    }
    return KEYHOLE_OK;
  }

  const uint32_t size_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::vector<char>> parts_, whole_[2];
  uint64_t rounds_ = 0;
  uint32_t come_ = 0;
  bool is_aborted_ = false, is_one_dead_ = false;
  uint32_t killed_rank_ = UINT32_MAX, killed_at_ = 0;
};

struct CommunicatorDeleter {
  void operator()(keyhole_communicator* c) const { keyhole_communicator_destroy(c); }
};
using CommunicatorPtr = std::unique_ptr<keyhole_communicator, CommunicatorDeleter>;

}  // namespace keyhole::test

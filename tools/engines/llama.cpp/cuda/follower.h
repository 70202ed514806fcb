// A thread that brings a prompt's tokens to sessions while the next batch is computed.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tools/engines/llama.cpp/session.h"

namespace keyhole::llama_cpp {

/// All tokens that a session is to have: where they lie in a stream, in their order.
struct Following {
  Session* session = nullptr;
  uint32_t stream = 0;
  std::vector<uint32_t> cells;
};

/// Used by one thread at a time. Sessions are the follower's from take() until finish() or drop() is behind.
class Follower {
 public:
  /// Brings a session what it lacks; called by the follower's thread, and never twice at once. May throw
  /// std::exception.
  using Bring = std::function<void(const Following&)>;
  explicit Follower(Bring bring) : bring_(std::move(bring)) {}
  /// As drop().
  ~Follower();
  Follower(const Follower&) = delete;
  Follower& operator=(const Follower&) = delete;

  /// Brings sessions these tokens soon, in this order. Of a session whose tokens wait already the new list takes the
  /// old one's place, as it goes on with the same tokens: where the host is slower than the card, a list for each
  /// session waits, and no more. Throws std::runtime_error with what has failed since it was last told; nothing is
  /// taken then.
  void take(std::vector<Following> work);
  /// Waits until all is brought. Throws as take() does; what waited behind a failure is not brought.
  void finish();
  /// Waits for the session that is being brought something, and forgets all others, and failures.
  void drop();

 private:
  void run();
  void wait(std::unique_lock<std::mutex>& lock);
  void tell();

  Bring bring_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Following> waiting_;
  std::optional<std::string> failure_;
  bool is_busy_ = false;
  bool ends_ = false;
  std::thread thread_;  // there from the first work on
};

}  // namespace keyhole::llama_cpp

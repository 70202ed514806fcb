// The sessions of an engine that are open, so that somebody can look at all of them while their callers use them. A
// call on a session excludes others (Error(busy)); a look waits for the call that is inside, and a call that comes
// meanwhile waits for the look, which takes microseconds: no call fails because somebody looks.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "runtime/session/session_interface.h"

namespace keyhole::runtime {

/// Who is inside a session.
class SessionUse {
 public:
  explicit SessionUse(SessionInterface& session) : session_(&session) {}
  SessionUse(const SessionUse&) = delete;
  SessionUse& operator=(const SessionUse&) = delete;

  /// A call enters. Throws Error(busy) where another call is inside.
  void begin_call() {
    for (;;) {
      State seen = state_.load(std::memory_order_relaxed);
      // A decoder's calls follow each other so closely that a look would never find the session free: it comes first.
      if (seen == State::free && looks_.load(std::memory_order_relaxed) == 0 &&
          state_.compare_exchange_weak(seen, State::called, std::memory_order_acquire,
                                       std::memory_order_relaxed)) {
        return;
      }
      if (seen == State::called || seen == State::gone) {
        throw Error(Status::busy, "the session is in use by another thread");
      }
      std::this_thread::yield();
    }
  }
  void end_call() noexcept { state_.store(State::free, std::memory_order_release); }
  /// Another one takes the session's place, in a call.
  void replace(SessionInterface& session) { session_ = &session; }
  /// The session is about to go: nobody looks at it from now on.
  void leave() noexcept {
    for (;;) {
      State seen = State::free;
      if (state_.compare_exchange_weak(seen, State::gone, std::memory_order_acquire,
                                       std::memory_order_relaxed) ||
          seen == State::gone) {
        return;
      }
      if (seen != State::free) std::this_thread::yield();
    }
  }

  /// Runs look(session) when no call is inside; not at all once the session has gone.
  template <class Look>
  void look(const Look& look) {
    constexpr std::chrono::microseconds kPause{50};
    const Waiting waiting(looks_);
    for (;;) {
      State seen = State::free;
      if (state_.compare_exchange_weak(seen, State::looked_at, std::memory_order_acquire,
                                       std::memory_order_relaxed)) {
        break;
      }
      if (seen == State::gone) return;
      if (seen != State::free) std::this_thread::sleep_for(kPause);
    }
    const End end{this};
    look(*session_);
  }

 private:
  enum class State : uint8_t { free, called, looked_at, gone };
  struct End {
    SessionUse* use;
    ~End() { use->end_call(); }
  };

  struct Waiting {
    explicit Waiting(std::atomic<uint32_t>& looks) : all(looks) { ++all; }
    ~Waiting() { --all; }
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;
    std::atomic<uint32_t>& all;
  };

  std::atomic<State> state_{State::free};
  std::atomic<uint32_t> looks_{0};  ///< threads that look or wait to
  SessionInterface* session_;
};

/// A call is inside a session as long as it lives; throws Error(busy) if another call is.
class SessionCall {
 public:
  explicit SessionCall(SessionUse& use) : use_(&use) { use.begin_call(); }
  ~SessionCall() { use_->end_call(); }
  SessionCall(const SessionCall&) = delete;
  SessionCall& operator=(const SessionCall&) = delete;

 private:
  SessionUse* use_;
};

/// From any thread.
class OpenSessions {
 public:
  [[nodiscard]] std::shared_ptr<SessionUse> add(SessionInterface& session) {
    auto use = std::make_shared<SessionUse>(session);
    const std::lock_guard lock(mutex_);
    uses_.push_back(use);
    return use;
  }
  void remove(const SessionUse& use) noexcept {
    const std::lock_guard lock(mutex_);
    std::erase_if(uses_, [&](const auto& other) { return other.get() == &use; });
  }
  /// Runs look(session) for one session after the other, of those that were open when it was called.
  template <class Look>
  void look(const Look& look) const {
    std::vector<std::shared_ptr<SessionUse>> all;
    {
      const std::lock_guard lock(mutex_);
      all = uses_;
    }
    for (const auto& use : all) use->look(look);
  }

 private:
  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<SessionUse>> uses_;
};

}  // namespace keyhole::runtime

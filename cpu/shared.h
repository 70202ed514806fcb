// A value that copies hold together until one of them changes it (copy on write).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include "cpu/types.h"

namespace keyhole::cpu {

/// Holds a T, or nothing; a copy holds the same T. Before it is changed, own() makes the T this object's alone, by
/// T's copy constructor if another object holds it. Objects that hold the same T may be used, copied and destroyed by
/// different threads at once, each by one thread at a time; as with any object, several threads may read one that
/// none changes.
template <class T>
class Shared {
 public:
  /// An object that holds nothing.
  Shared() = default;
  /// Holds `value`. Throws std::bad_alloc, as does copying.
  explicit Shared(T value) : body_(std::make_shared<Body>(std::move(value))) {
    number_ = body_->join();
  }
  Shared(const Shared& o) : body_(o.body_) {
    if (body_ != nullptr) number_ = body_->join();
  }
  Shared(Shared&& o) noexcept : body_(std::move(o.body_)), number_(o.number_) {}
  // Two operators: of one that takes its argument by value clang says that it throws nothing, and with it classes that
  // hold a Shared, though the copy of the argument may.
  Shared& operator=(const Shared& o) { return *this = Shared(o); }  // NOLINT: it does
  Shared& operator=(Shared&& o) noexcept {
    Shared taken(std::move(o));
    std::swap(body_, taken.body_);
    std::swap(number_, taken.number_);
    return *this;
  }
  ~Shared() {
    if (body_ != nullptr) body_->leave(number_);
  }

  [[nodiscard]] explicit operator bool() const { return body_ != nullptr; }
  // All below need an object that holds something.
  [[nodiscard]] const T& operator*() const { return body_->value; }
  [[nodiscard]] const T* operator->() const { return &body_->value; }
  [[nodiscard]] const T* get() const { return body_ == nullptr ? nullptr : &body_->value; }

  /// The T, which this object alone holds from now on. Throws Error(out_of_memory) and what T's copy constructor
  /// throws; then nothing has changed.
  [[nodiscard]] T& own() {
    // Nobody can come to hold it meanwhile: that takes a copy of this object, the only holder.
    if (body_->is_only(number_)) return body_->value;
    try {
      *this = Shared(T(std::as_const(body_->value)));
    } catch (const std::bad_alloc&) {
      throw Error(Status::out_of_memory,
                  "no memory for a copy of its own of what a session shares with its copies");
    }
    return body_->value;
  }
  /// Whether another object holds the T, too.
  [[nodiscard]] bool is_shared() const { return !body_->is_only(number_); }
  /// Whether this object is the first of those that still hold the T. Counted by the first alone, T's memory is
  /// counted once.
  [[nodiscard]] bool is_first() const { return body_->is_first(number_); }

 private:
  struct Body {
    explicit Body(T&& v) : value(std::move(v)) {}

    [[nodiscard]] uint64_t join() {
      const std::lock_guard lock(mutex);
      holders.push_back(next);
      return next++;
    }
    void leave(uint64_t number) noexcept {
      const std::lock_guard lock(mutex);
      holders.erase(std::find(holders.begin(), holders.end(), number));
    }
    [[nodiscard]] bool is_only(uint64_t number) const {
      const std::lock_guard lock(mutex);
      return holders.size() == 1 && holders.front() == number;
    }
    [[nodiscard]] bool is_first(uint64_t number) const {
      const std::lock_guard lock(mutex);
      return holders.front() == number;
    }

    T value;
    mutable std::mutex
        mutex;  ///< of all below; who was the last to leave has read the value before
    std::vector<uint64_t> holders;  ///< numbers, in the order in which they came
    uint64_t next = 0;
  };

  std::shared_ptr<Body> body_;
  uint64_t number_ = 0;  ///< this holder's
};

/// Bytes of what `shared` holds that another holder counts; 0 where this one counts them or it holds nothing.
template <class T>
[[nodiscard]] size_t bytes_of_others(const Shared<T>& shared) {
  return !shared || shared.is_first() ? 0 : shared->bytes();
}

}  // namespace keyhole::cpu

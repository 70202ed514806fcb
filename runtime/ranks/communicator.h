// What ranks say to each other: messages of equal length from every rank to every rank, over a transport that the user
// has brought (keyhole/parallel.h). Each message says which call it belongs to, so that ranks whose calls differ notice
// it, and how the call went on its rank, so that an error of one is every rank's.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cpu/home_process.h"
#include "cpu/types.h"
#include "keyhole/parallel.h"

namespace keyhole::runtime {

/// How long ranks may be apart.
enum class Wait : uint8_t {
  step,  ///< timeout_ms
  work   ///< long_timeout_ms: some have much to do before they come
};

class Communicator {
 public:
  /// Owns the transport's context once it is made. Throws Error(invalid_argument).
  Communicator(const keyhole_transport& transport, const keyhole_communicator_config& config);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  [[nodiscard]] uint32_t rank() const { return transport_.rank; }
  [[nodiscard]] uint32_t size() const { return transport_.size; }
  [[nodiscard]] const keyhole_communicator_config& config() const { return config_; }

  /// A call that all ranks make together. Ranks whose `what` or `detail` differ do not make the same.
  struct Call {
    const char* what = "";  ///< for errors
    uint64_t detail = 0;
    Wait wait = Wait::step;
  };

  /// The payloads of all ranks, one after the other, valid until the next call. `error`: why this rank could not do its
  /// part; null: it could. Where one could not, throws on all ranks Error(its status, "rank R: its text"). Throws
  /// Error(timeout | rank_failed) where ranks are lost or make another call; then all later calls throw the same.
  /// Error(busy): another thread is inside.
  struct Payloads {
    const std::byte* data = nullptr;
    size_t stride = 0;
    [[nodiscard]] const std::byte* of(uint32_t rank) const { return data + rank * stride; }
  };
  [[nodiscard]] Payloads exchange(const Call& call, std::span<const std::byte> own,
                                  const std::exception_ptr& error = nullptr);
  /// The same without payloads: all have done their part, or it throws.
  void agree(const Call& call, const std::exception_ptr& error = nullptr) {
    (void)exchange(call, {}, error);
  }
  /// Runs `part`, and then agree()s: throws on all ranks what it threw on one.
  void together(const Call& call, const std::function<void()>& part);

  /// Device memory of every rank, enqueued on `stream`. Throws Error(unsupported) where the transport has no such
  /// function, Error(timeout | rank_failed | busy) as exchange().
  void gather_on_stream(const void* own, void* all, size_t bytes, void* stream);

  /// Whether the transport has gathers of device memory.
  [[nodiscard]] bool gathers_on_stream() const {
    return transport_.all_gather_on_stream != nullptr;
  }
  /// Ranks are lost: a gather on a stream has not ended in time. What is enqueued ends. Throws Error(status); busy: as
  /// exchange().
  [[noreturn]] void abandon(Status status, const std::string& text);

  /// Adds up in the order of the ranks.
  void sum(std::span<float> values);
  void broadcast(std::span<std::byte> data, uint32_t root);

  /// Whether ranks are lost.
  [[nodiscard]] bool is_lost() const { return lost_status_ != Status::ok; }

 private:
  void gather(const std::byte* own, std::byte* all, size_t bytes, Wait wait);
  [[noreturn]] void lose(Status status, const std::string& text);
  [[noreturn]] void lose_transport(keyhole_status status, const char* text);
  [[noreturn]] void throw_lost() const;
  void check_calls(const Call& call, size_t bytes, size_t stride);
  void throw_first_error(const Call& call, const std::exception_ptr& error, size_t stride);

  keyhole_transport transport_;
  keyhole_communicator_config config_;
  std::atomic<bool> in_use_ = false;
  uint64_t calls_ = 0;
  Status lost_status_ = Status::ok;
  std::string lost_text_;
  std::vector<std::byte> own_, all_;
};

}  // namespace keyhole::runtime

/// The handle of the C API.
struct keyhole_communicator {
  std::shared_ptr<keyhole::runtime::Communicator> communicator;
  keyhole::cpu::HomeProcess home;
};

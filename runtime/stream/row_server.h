// Reads the rows that steps over codes attend exactly, where the device does not (gpu::Codes::serve_rows()): a thread
// that answers the device's requests while steps are under way, and sleeps otherwise.
//
// It is a thread of its own, as a step waits for it in the middle of a kernel: the thread that serves steps
// (StreamServer) waits for what that kernel publishes, which may have no room on the device until rows have come.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

#include "gpu/codes.h"

namespace keyhole::runtime {

class RowServer {
 public:
  struct Waits {
    uint32_t spin_us = 0;         ///< without steps, before the thread sleeps
    uint32_t timeout_ms = 20000;  ///< for a step, until the thread sleeps
  };

  /// The codes, with rows_by_host, outlive it. Throws Error(out_of_memory) where the system gives no thread.
  RowServer(gpu::Codes& codes, uint32_t kv_heads, const Waits& waits);
  /// Ends the thread; steps that were not served wait no more.
  ~RowServer();
  RowServer(const RowServer&) = delete;
  RowServer& operator=(const RowServer&) = delete;

  /// One more step over the codes is about to be enqueued. Where it then is not, the thread waits for it in vain, until
  /// the timeout after any step. From one thread at a time.
  void expect();
  /// Steps that were served, cyclic.
  [[nodiscard]] uint32_t served() const { return static_cast<uint32_t>(served_.load()); }

 private:
  void work();
  /// Answers what has been asked; whether all KV heads were served in a step more than before.
  bool serve();

  gpu::Codes* codes_;
  uint32_t kv_heads_;
  Waits waits_;
  std::atomic<bool> stop_{false};
  // Counts, cyclic. int: the type that atomic::wait hands to the futex without a proxy.
  alignas(64) std::atomic<int> expected_{0};
  alignas(64) std::atomic<int> served_{0};
  std::thread thread_;
};

}  // namespace keyhole::runtime

// The host's end of a session's steps on a CUDA device: pinned memory (gpu/resident_layout.h) in which q, k and v of a
// step come to the host, and in which its states go back. What StreamSteps says of these functions holds here.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "gpu/cuda/common/memory.h"
#include "gpu/cuda/exchange/answer.h"
#include "gpu/cuda/exchange/step_params.h"
#include "gpu/resident_layout.h"
#include "gpu/step.h"

namespace keyhole::gpu {

class HostExchange {
 public:
  /// Takes pinned memory of the current device. Throws Error(out_of_memory), Error(device_error).
  HostExchange(const ResidentShape& shape, uint32_t timeout_ms);
  HostExchange(const HostExchange&) = delete;
  HostExchange& operator=(const HostExchange&) = delete;

  // What kernels are told of a step of the layer: where it publishes its rows, where it waits for the host's states,
  // and where it leaves its answer.
  void set_publishing(uint32_t layer, StepParams& p) const;
  void set_waiting(uint32_t layer, MergeParams& m) const;
  void set_answers(uint32_t layer, AnswerParams& p) const;
  /// Where kernels say what went wrong: the device's pointer.
  [[nodiscard]] FailureLine* failure_line() const {
    return memory_.device<FailureLine>(layout_.failure());
  }
  /// How long kernels wait for the host.
  [[nodiscard]] uint64_t timeout_ns() const { return uint64_t{timeout_ms_} * 1'000'000; }
  [[nodiscard]] uint32_t timeout_ms() const { return timeout_ms_; }

  // Steps on a stream.
  [[nodiscard]] bool await(uint32_t layer, uint32_t sequence, uint32_t spin_us, uint64_t timeout_us,
                           const std::atomic<bool>& stop, Published& out);
  /// The layer's newest step that await() has seen.
  [[nodiscard]] uint32_t awaited(uint32_t layer) const {
    return awaited_[layer].load(std::memory_order_relaxed);
  }
  [[nodiscard]] StateView host_slot(uint32_t layer, uint32_t kv_head) const;
  void deliver(uint32_t layer, uint32_t kv_head, uint32_t sequence);
  void give_up(uint32_t layer, uint32_t sequence);
  void give_up_all();
  [[nodiscard]] bool answer(uint32_t layer, uint32_t kv_head, uint32_t sequence,
                            StateView& out) const;
  /// What kernels have noted since the last call (Status::timeout, cancelled), or Status::ok.
  [[nodiscard]] Status failure(std::string& text);
  /// Waits, on this thread, until the host has delivered all heads of a layer's step. False: the step was given up.
  /// Throws Error(timeout).
  [[nodiscard]] bool wait_for_delivery(uint32_t layer, uint32_t sequence) const;

  // Steps with tensors of the host, one at a time: where their q passes through, and where their result comes.
  [[nodiscard]] std::byte* host_q() const { return memory_.data() + layout_.host_q(); }
  [[nodiscard]] size_t q_bytes() const { return layout_.q_bytes(); }
  /// Makes the kernel of such a step write its result here, and raise `ticket` when it has.
  void set_result(uint32_t ticket, StepParams& p) const;
  /// Whether the kernel has raised `ticket` for all KV heads. first: heads that have by now, kept from call to call.
  [[nodiscard]] bool has_result(uint32_t ticket, uint32_t& first) const;
  void read_result(StateView out) const;

  /// Memory for what is copied back from the device now and then, `[kv_heads]` of RingState or WaitSums.
  [[nodiscard]] std::byte* copied() const { return memory_.data() + layout_.copied(); }

 private:
  [[nodiscard]] uint32_t group() const { return shape_.q_heads / shape_.kv_heads; }

  const ResidentShape shape_;
  const PinnedLayout layout_;
  const uint32_t timeout_ms_;
  std::vector<std::atomic<uint32_t>> awaited_;  ///< [layer]
  PinnedBuffer memory_;
};

}  // namespace keyhole::gpu

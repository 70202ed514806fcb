// Resident tokens in the memory of a CUDA device, and the exchange with the host in the order of a stream.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "gpu/cuda/common/device_scope.h"
#include "gpu/cuda/common/memory.h"
#include "gpu/cuda/common/session_memory.h"
#include "gpu/cuda/common/stream.h"
#include "gpu/resident_layout.h"
#include "gpu/cuda/resident/step_kernel.h"
#include "gpu/device.h"
#include "gpu/mirror.h"

namespace keyhole::gpu {

class CudaCodes;

/// Steps with tensors of the host and everything that moves rows go through a stream of its own, and are ordered
/// after the caller's steps by the numbers that the device publishes, never by waiting for the caller's stream
/// (which may be waiting for this very thread).
class CudaResident final : public Resident, public StreamSteps {
 public:
  /// Throws Error: unsupported without such a device, invalid_argument, out_of_device_memory (with the bytes needed and there; nothing
  /// is allocated then), device_error.
  CudaResident(const ResidentShape& shape, const CudaConfig& config,
               const std::shared_ptr<SessionOnDevice>& session);
  ~CudaResident() override;

  // Resident
  void append_sink(uint32_t layer, const std::byte* k, const std::byte* v, uint32_t n) override;
  void append_window(uint32_t layer, const std::byte* k, const std::byte* v, uint32_t n) override;
  void evict(uint32_t layer, std::byte* k, std::byte* v, uint32_t n) override;
  void truncate(uint32_t layer, uint32_t sink, uint32_t window) override;
  [[nodiscard]] uint32_t sink_count(uint32_t layer) const override;
  [[nodiscard]] uint32_t window_count(uint32_t layer) const override;
  using Resident::attend_begin;
  void attend_begin(uint32_t layer, const float* q, Codes* codes) override;
  [[nodiscard]] uint32_t host_tasks() const override { return 0; }
  void run_host_task(uint32_t) override {}
  [[nodiscard]] StateView host_state(uint32_t) override { return {}; }
  void attend_end(StateView out) override;
  void read(uint32_t layer, std::byte* k, std::byte* v) const override;
  [[nodiscard]] StreamSteps* stream_steps() override { return this; }
  [[nodiscard]] ResidentPlace place() const override;

  // StreamSteps
  void begin(uint32_t layer, const DeviceRows& q, const DeviceRows* k, const DeviceRows* v,
             const OnDevice& tokens, Stream stream) override;
  void end(uint32_t layer, const DeviceRows& out, float* lse, Stream stream) override;
  void step(uint32_t layer, const DeviceRows& q, const DeviceRows* k, const DeviceRows* v,
            const OnDevice& tokens, const DeviceRows& out, float* lse, Stream stream) override;
  void step_tokens(uint32_t layer, const ManyTokens& tokens, Codes& codes, Stream stream) override;
  [[nodiscard]] std::unique_ptr<StepGroup> make_group(uint32_t most) override;
  void keep_newest(std::span<const uint32_t> layers, uint32_t of, std::span<const uint32_t> kept,
                   Stream stream) override;
  void keep_newest_of_copy(uint32_t layer, uint32_t of, std::span<const uint32_t> kept) override {
    mirror_.keep_newest(layer, of, kept);
  }
  [[nodiscard]] Signal signal() const override { return signal_; }
  [[nodiscard]] uint64_t capture_id(Stream stream) const override;
  [[nodiscard]] bool await(uint32_t layer, uint32_t sequence, uint32_t spin_us, uint64_t timeout_us,
                           const std::atomic<bool>& stop, Published& out) override;
  [[nodiscard]] StateView host_slot(uint32_t layer, uint32_t kv_head) override;
  void deliver(uint32_t layer, uint32_t kv_head, uint32_t sequence) override;
  void give_up(uint32_t layer, uint32_t sequence) override;
  void give_up_all() override;
  [[nodiscard]] bool answer(uint32_t layer, uint32_t kv_head, uint32_t sequence,
                            StateView& out) override;
  [[nodiscard]] ResidentRows host_copy(uint32_t layer, uint32_t kv_head) override;
  uint32_t update_host_copy(uint32_t layer, const Published& published, std::byte* k,
                            std::byte* v) override;
  [[nodiscard]] ResidentPieces device_rows(uint32_t layer) override;
  void synchronize(Stream stream) override;
  [[nodiscard]] Status failure(std::string& text) override;
  [[nodiscard]] uint64_t wait_nanoseconds() const override;
  [[nodiscard]] uint64_t merges() const override;

 private:
  struct Layer {
    std::atomic<uint32_t> awaited{0};  ///< newest step that await() saw
    uint32_t idle_after = 0;           ///< newest step that wait_idle() saw the end of
    uint32_t begun =
        0;  ///< steps enqueued in halves, where there are no graphs of them (Signal::host_launch)
    CudaCodes* codes = nullptr;  ///< of the newest step that was enqueued
    DeviceRows q;                ///< likewise, of a step with codes
    bool keeps_answer = false;   ///< likewise
  };

  void append(uint32_t layer, uint32_t first, const std::byte* k, const std::byte* v, uint32_t n);
  void publish_state(uint32_t layer);
  /// Waits until the layer's newest awaited step no longer reads K and V. Throws Error(timeout).
  void wait_idle(uint32_t layer);
  /// Copies scratch memory back, on the own stream; at most layout_'s copied(). Any thread.
  void copy_back(size_t from, void* to, size_t bytes) const;
  /// Waits for what the own stream has under way, before the caller's stream may read it.
  void finish_own();
  [[nodiscard]] StepParams step_params(uint32_t layer) const;
  [[nodiscard]] MergeParams merge_params(uint32_t layer, const DeviceRows& out, float* lse) const;
  [[nodiscard]] StepParams stream_params(uint32_t layer, const DeviceRows& q, const DeviceRows* k,
                                         const DeviceRows* v);
  void check_step(uint32_t layer, const DeviceRows& q, const DeviceRows* k,
                  const DeviceRows* v) const;
  /// Of step `sequence`, on this thread. False: given up. Throws Error(timeout).
  [[nodiscard]] bool wait_for_delivery(uint32_t layer, uint32_t sequence) const;
  /// Enqueues the second half of a step that ends in a kernel of its own.
  void write(uint32_t layer, const DeviceRows& out, float* lse, Stream stream);
  /// Throws Error(invalid_argument) where there is no memory for answers.
  void set_keeps_answer(Layer& layer, bool keeps) const;
  /// Of a step that keeps its answer: where it goes in place of out and lse, and what then writes these.
  [[nodiscard]] DeviceRows answer_rows() const;
  [[nodiscard]] float* answer_lse() const;
  void hand_answer_over(uint32_t layer, const DeviceRows& out, float* lse, Stream stream);
  /// What begins every step on a caller's stream: checks it, notes what stands on the device for offloaded tokens.
  [[nodiscard]] StepParams open_step(uint32_t layer, const DeviceRows& q, const DeviceRows* k,
                                     const DeviceRows* v, const OnDevice& tokens, Stream stream);
  /// Of a step with codes, which waits for the host to have taken the step before.
  [[nodiscard]] StepParams params_with_codes(uint32_t layer, StepParams p);
  /// Throws Error(unsupported) where the stream records a graph and steps cannot be recorded.
  void check_capture(Stream stream) const;
  [[nodiscard]] size_t layer_bytes() const;

  const ResidentShape shape_;
  const CudaConfig config_;
  const SessionMemory memory_;
  const RingShape ring_;
  const PinnedLayout layout_;
  const ScratchLayout scratch_layout_;
  const size_t row_bytes_;  ///< of one token, all heads: K, or V
  Signal signal_ = Signal::device_wait;

  Mirror mirror_;
  std::vector<Layer> layers_;
  std::unique_ptr<StepLauncher> launcher_;
  DeviceBuffer kv_, scratch_;
  PinnedBuffer pinned_, staging_;
  std::unique_ptr<OwnStream> own_;
  mutable std::mutex copy_mutex_;
  std::unique_ptr<Event> staged_[2];  ///< this half of the staging memory may be filled again
  uint32_t half_ = 0;
  bool own_is_busy_ = false;
  bool streams_used_ =
      false;  ///< there were steps on a caller's stream, and graphs of them may exist

  uint32_t ticket_ = 0;  ///< of the newest step with tensors of the host
  bool host_step_has_codes_ =
      false;  ///< of that step: its result comes from another kernel, which raises no flag
};

}  // namespace keyhole::gpu

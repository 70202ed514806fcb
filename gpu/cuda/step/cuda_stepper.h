// A session's resident tokens on a CUDA device, as a session sees them, and the steps over them: what decides which
// kernels a step of a layer takes, and tells them where the stores have what they need (gpu/cuda/resident,
// gpu/cuda/codes) and where host and device meet (gpu/cuda/exchange). The stores know neither this class nor each
// other.
#pragma once

#include <atomic>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "gpu/cuda/common/session_memory.h"
#include "gpu/cuda/exchange/host_exchange.h"
#include "gpu/cuda/resident/resident_store.h"
#include "gpu/cuda/rings/step_kernel.h"
#include "gpu/device.h"
#include "gpu/resident.h"

namespace keyhole::gpu {

class CudaCodes;

class CudaStepper final : public Resident, public StreamSteps {
 public:
  /// Throws Error: unsupported without such a device, invalid_argument, out_of_device_memory (with the bytes needed and
  /// there; nothing is allocated then), out_of_memory, device_error.
  CudaStepper(const ResidentShape& shape, const CudaConfig& config,
              const std::shared_ptr<SessionOnDevice>& session);
  ~CudaStepper() override;
  CudaStepper(const CudaStepper&) = delete;
  CudaStepper& operator=(const CudaStepper&) = delete;

  // Resident: tokens of the host.
  void append_sink(uint32_t layer, const std::byte* k, const std::byte* v, uint32_t n) override {
    store_->append_sink(layer, k, v, n);
  }
  void append_window(uint32_t layer, const std::byte* k, const std::byte* v, uint32_t n) override {
    store_->append_window(layer, k, v, n);
  }
  void evict(uint32_t layer, std::byte* k, std::byte* v, uint32_t n) override {
    store_->evict(layer, k, v, n);
  }
  void truncate(uint32_t layer, uint32_t sink, uint32_t window) override {
    store_->truncate(layer, sink, window);
  }
  [[nodiscard]] uint32_t sink_count(uint32_t layer) const override {
    return store_->sink_count(layer);
  }
  [[nodiscard]] uint32_t window_count(uint32_t layer) const override {
    return store_->window_count(layer);
  }
  void read(uint32_t layer, std::byte* k, std::byte* v) const override {
    store_->read(layer, k, v);
  }
  [[nodiscard]] StreamSteps* stream_steps() override { return this; }
  [[nodiscard]] ResidentPlace place() const override;

  // Resident: steps with tensors of the host. They go through a stream of their own.
  using Resident::attend_begin;
  void attend_begin(uint32_t layer, const float* q, Codes* codes) override;
  [[nodiscard]] uint32_t host_tasks() const override { return 0; }
  void run_host_task(uint32_t) override {}
  [[nodiscard]] StateView host_state(uint32_t) override { return {}; }
  void attend_end(StateView out) override;

  // StreamSteps: what is enqueued.
  void begin(uint32_t layer, const TensorView& q, const TensorView* k, const TensorView* v,
             const OnDevice& tokens, Stream stream) override;
  void end(uint32_t layer, const TensorOut& out, float* lse, Stream stream) override;
  void step(uint32_t layer, const TensorView& q, const TensorView* k, const TensorView* v,
            const OnDevice& tokens, const TensorOut& out, float* lse, Stream stream) override;
  void step_tokens(uint32_t layer, const ManyTokens& tokens, Codes& codes, Stream stream) override;
  [[nodiscard]] std::unique_ptr<StepGroup> make_group(uint32_t most) override;
  void keep_newest(std::span<const uint32_t> layers, uint32_t of, std::span<const uint32_t> kept,
                   Stream stream) override;
  [[nodiscard]] Signal signal() const override { return signal_; }
  [[nodiscard]] uint64_t capture_id(Stream stream) const override;
  void synchronize(Stream stream) override;
  [[nodiscard]] Status failure(std::string& text) override;

  // StreamSteps: the host's end.
  [[nodiscard]] bool await(uint32_t layer, uint32_t sequence, uint32_t spin_us, uint64_t timeout_us,
                           const std::atomic<bool>& stop, Published& out) override {
    return exchange_->await(layer, sequence, spin_us, timeout_us, stop, out);
  }
  [[nodiscard]] StateView host_slot(uint32_t layer, uint32_t kv_head) override {
    return exchange_->host_slot(layer, kv_head);
  }
  void deliver(uint32_t layer, uint32_t kv_head, uint32_t sequence) override {
    exchange_->deliver(layer, kv_head, sequence);
  }
  void give_up(uint32_t layer, uint32_t sequence) override { exchange_->give_up(layer, sequence); }
  void give_up_all() override { exchange_->give_up_all(); }
  [[nodiscard]] bool answer(uint32_t layer, uint32_t kv_head, uint32_t sequence,
                            StateView& out) override {
    return exchange_->answer(layer, kv_head, sequence, out);
  }
  [[nodiscard]] uint64_t wait_nanoseconds() const override;
  [[nodiscard]] uint64_t merges() const override;

  // StreamSteps: the rows.
  [[nodiscard]] KvPieces host_copy(uint32_t layer) override { return store_->host_copy(layer); }
  uint32_t update_host_copy(uint32_t layer, const Published& published, std::byte* k,
                            std::byte* v) override {
    return store_->mirror().update_host_copy(layer, published.k, published.v, k, v);
  }
  void keep_newest_of_copy(uint32_t layer, uint32_t of, std::span<const uint32_t> kept) override {
    store_->mirror().keep_newest(layer, of, kept);
  }
  [[nodiscard]] KvPieces device_rows(uint32_t layer) override { return store_->device_rows(layer); }

 private:
  /// Of the newest step of a layer that was enqueued.
  struct Layer {
    uint32_t begun =
        0;  ///< steps enqueued in halves, where there are no graphs of them (Signal::host_launch)
    CudaCodes* codes = nullptr;
    TensorView q;  ///< of a step with codes
    bool keeps_answer = false;
  };

  void choose_signal();
  void check_step(uint32_t layer, const TensorView& q, const TensorView* k,
                  const TensorView* v) const;
  void check_layer(uint32_t layer) const;
  /// Throws Error(unsupported) where the stream records a graph and steps cannot be recorded.
  void check_capture(Stream stream) const;
  /// Throws Error(invalid_argument) where there is no memory for answers.
  void set_keeps_answer(Layer& layer, bool keeps) const;

  /// What kernels of any step of the layer are told, with the counters and partial states of one queue.
  [[nodiscard]] StepParams step_params(uint32_t layer, StepQueue queue) const;
  [[nodiscard]] MergeParams merge_params(uint32_t layer, const TensorOut& out, float* lse) const;
  /// What begins every step on a caller's stream: checks it, and notes what stands on the device for offloaded tokens.
  [[nodiscard]] StepParams open_step(uint32_t layer, const TensorView& q, const TensorView* k,
                                     const TensorView* v, const OnDevice& tokens, Stream stream);
  /// Of a step with codes, which waits for the host to have taken the step before.
  [[nodiscard]] StepParams params_with_codes(uint32_t layer, StepParams p);
  /// Enqueues the second half of a step that ends in a kernel of its own.
  void write(uint32_t layer, const TensorOut& out, float* lse, Stream stream);

  // A step that keeps its answer writes it here in place of out and lse, and a kernel more takes it to these and to the
  // host.
  [[nodiscard]] TensorOut answer_rows() const;
  [[nodiscard]] float* answer_lse() const;
  void hand_answer_over(uint32_t layer, const TensorOut& out, float* lse, Stream stream);

  /// Of the KV head with the largest: heads wait at the same time, so that the one that waited longest stands for the
  /// step.
  [[nodiscard]] uint64_t most_of(uint64_t WaitSums::*sum) const;

  const ResidentShape shape_;
  const CudaConfig config_;
  const SessionMemory memory_;
  Signal signal_ = Signal::device_wait;

  std::vector<Layer> layers_;
  std::unique_ptr<StepLauncher> launcher_;
  std::unique_ptr<HostExchange> exchange_;
  std::unique_ptr<ResidentStore> store_;

  uint32_t ticket_ = 0;  ///< of the newest step with tensors of the host
  bool host_step_has_codes_ =
      false;  ///< of that step: its result comes from another kernel, which raises no flag
};

}  // namespace keyhole::gpu

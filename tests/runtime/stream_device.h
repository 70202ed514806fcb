// A device with streams that needs no GPU: a thread runs one launch after the other, as a stream does, and host
// memory is its memory. It computes by the definition, in double precision or by the host device, and signals as
// gpu/step.h says. Faults can be planted.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gpu/device.h"
#include "runtime/engine/host_device.h"
#include "tests/runtime/fake_codes.h"
#include "tests/runtime/fake_stream.h"

namespace keyhole::test {

/// The kinds of calls that a device may refuse.
enum class DeviceCall {
  memory,  ///< to take device memory
  pinned,  ///< to pin host memory
  command  ///< a launch or a copy
};

struct FakeFaults {
  /// Called before each of them; may throw what the device would.
  std::function<void(DeviceCall)> on_call = [](DeviceCall) {};
  std::atomic<bool> loses_queries{false};  ///< q never arrives
  std::atomic<bool> stalls{
      false};  ///< a head's state is never handed over, as of a worker that hangs
  std::atomic<bool> fails{false};  ///< no half of a step can be launched, as after a CUDA error
  std::atomic<bool> fails_to_end{false};     ///< a first half can, a second one cannot
  uint32_t timeout_ms = 2000;                ///< of waits on the device
  std::atomic<uint64_t> steps_of_tokens{0};  ///< of several tokens each
  std::atomic<bool> fails_together{false};   ///< steps of several sessions cannot be launched
  /// How many steps each launch of a group had, over all devices; written by the threads that call.
  std::vector<uint32_t> launches_of_groups;
  /// Called by threads that wait for the queries of a step, to hold them up.
  std::function<void()> on_await = [] {};
  std::atomic<uint64_t> answers_kept{
      0};  ///< steps that were enqueued or captured to leave an answer for the host
  /// Called with an answer before it is written, o `[q_heads, head_dim]` and lse `[q_heads]`, to make it wrong.
  std::function<void(uint32_t layer, uint32_t sequence, float* o, float* lse)> on_answer =
      [](uint32_t, uint32_t, float*, float*) {};
};

/// Steps that wait for one another, of one kind, as all sessions of a FakeStream are.
class FakeStepGroup final : public gpu::StepGroup {
 public:
  static constexpr uint32_t kMost = 4;  ///< of a launch

  explicit FakeStepGroup(FakeFaults& faults) : faults_(&faults) {}
  /// Adds a step. push: pushes it to its stream.
  void add(std::function<void()> push) { steps_.push_back(std::move(push)); }
  [[nodiscard]] uint32_t count() const override { return static_cast<uint32_t>(steps_.size()); }
  void launch(std::span<std::exception_ptr> errors) noexcept override;

 private:
  FakeFaults* faults_;
  std::vector<std::function<void()>> steps_;
};

class FakeDevice final : public gpu::Resident, public gpu::StreamSteps {
 public:
  FakeDevice(const gpu::ResidentShape& shape, const cpu::Kernels& kernels, FakeStream& stream,
             FakeFaults& faults);
  ~FakeDevice() override { stream_->wait(); }
  [[nodiscard]] const gpu::ResidentShape& shape() const { return shape_; }

  // Resident, whose calls change both copies alike:
  void append_sink(uint32_t l, const std::byte* k, const std::byte* v, uint32_t n) override;
  void append_window(uint32_t l, const std::byte* k, const std::byte* v, uint32_t n) override;
  void evict(uint32_t l, std::byte* k, std::byte* v, uint32_t n) override;
  void truncate(uint32_t l, uint32_t sink, uint32_t window) override;
  uint32_t sink_count(uint32_t l) const override { return host_.sink_count(l); }
  uint32_t window_count(uint32_t l) const override { return host_.window_count(l); }
  using gpu::Resident::attend_begin;
  void attend_begin(uint32_t l, const float* q, gpu::Codes* codes) override;
  uint32_t host_tasks() const override { return 0; }
  void run_host_task(uint32_t) override {}
  StateView host_state(uint32_t) override { return {}; }
  void attend_end(StateView out) override;
  void read(uint32_t l, std::byte* k, std::byte* v) const override { host_.read(l, k, v); }
  gpu::StreamSteps* stream_steps() override { return this; }

  // StreamSteps:
  void begin(uint32_t layer, const TensorView& q, const TensorView* k, const TensorView* v,
             const gpu::OnDevice& tokens, gpu::Stream) override;
  void end(uint32_t layer, const TensorOut& out, float* lse, gpu::Stream) override;
  void step(uint32_t layer, const TensorView& q, const TensorView* k, const TensorView* v,
            const gpu::OnDevice& tokens, const TensorOut& out, float* lse,
            gpu::Stream stream) override;
  std::unique_ptr<gpu::StepGroup> make_group(uint32_t) override;
  void step_tokens(uint32_t layer, const gpu::ManyTokens& tokens, gpu::Codes& codes,
                   gpu::Stream) override;
  void keep_newest(std::span<const uint32_t> layers, uint32_t of, std::span<const uint32_t> kept,
                   gpu::Stream) override;
  void keep_newest_of_copy(uint32_t layer, uint32_t of, std::span<const uint32_t> kept) override;
  gpu::Signal signal() const override { return gpu::Signal::device_wait; }
  uint64_t capture_id(gpu::Stream) const override { return stream_->capture_id(); }
  bool await(uint32_t layer, uint32_t sequence, uint32_t, uint64_t timeout_us,
             const std::atomic<bool>& stop, gpu::Published& out) override;
  StateView host_slot(uint32_t layer, uint32_t kv_head) override;
  void deliver(uint32_t layer, uint32_t kv_head, uint32_t sequence) override;
  void give_up(uint32_t layer, uint32_t sequence) override;
  bool answer(uint32_t layer, uint32_t kv_head, uint32_t sequence, StateView& out) override;
  KvPieces host_copy(uint32_t layer) override;
  uint32_t update_host_copy(uint32_t layer, const gpu::Published& p, std::byte* k,
                            std::byte* v) override;
  KvPieces device_rows(uint32_t layer) override;
  void synchronize(gpu::Stream) override;
  Status failure(std::string& text) override;
  uint64_t wait_nanoseconds() const override { return 0; }
  uint64_t merges() const override { return merges_.load(); }
  /// Notes a failure, as a wait of its codes does that ended in vain.
  void note_failure(Status status, const std::string& text);

 private:
  struct Rows {
    std::vector<float> q;
    std::vector<std::byte> k, v;
  };
  struct Answer {
    std::vector<float> o, lse;
  };
  struct Layer {
    Answer answers[2];  // of the step's parity
    bool keeps_answer = false;
    std::atomic<uint32_t> answered{0};
    Rows rows[2];  // of the step's parity: the host still reads those of the step before
    std::vector<float> o, lse, coded_o, coded_lse;
    uint32_t sequence = 0;   // the device's
    bool has_codes = false;  // the step does not wait for the host
    std::atomic<uint32_t> published{0}, attended{0}, given_up{0};
    std::vector<std::atomic<uint32_t>> delivered;
    Layer() = default;
    Layer(Layer&&) noexcept {}
  };
  struct Launch {
    uint32_t layer;
    TensorView q, k, v;
    bool appends;
    FakeCodes* codes;
    bool keeps_answer;
  };

  [[nodiscard]] size_t token_bytes() const;
  static KvPieces in_two_pieces(const KvView& rows);
  void command() const { faults_->on_call(DeviceCall::command); }
  /// Counts a step that is about to be enqueued, or cannot be.
  void count_begun();
  static bool reached(uint32_t value, uint32_t wanted);
  static bool wait_for(const std::atomic<uint32_t>& flag, uint32_t wanted, uint64_t timeout_us,
                       const std::atomic<bool>& stop);
  uint32_t take_in(runtime::HostDevice& device, uint32_t layer, const std::byte* tk,
                   const std::byte* tv, std::byte* k, std::byte* v);
  void keep(runtime::HostDevice& device, uint32_t layer, uint32_t of,
            std::span<const uint32_t> kept) const;
  /// Reads the heads of a token in fp32, without gaps.
  void read_token(const TensorView& from, uint32_t token, float* to) const;
  void run_tokens(uint32_t layer, const gpu::ManyTokens& t, FakeCodes& codes);
  void run_first_half(const Launch& launch);
  /// Waits until the layer's newest published step no longer reads K and V.
  void wait_idle(uint32_t layer) const;
  /// Waits until the host has acknowledged the layer's last step.
  bool await_host(const Layer& l);
  void note_timeout();
  void run_second_half(uint32_t layer, const TensorOut& out, float* lse);

  gpu::ResidentShape shape_;
  const cpu::Kernels* kernels_;
  FakeStream* stream_;
  FakeFaults* faults_;
  runtime::HostDevice host_, device_;
  std::vector<Layer> layers_;
  std::mutex mutex_;
  Status failure_ = Status::ok;
  std::string failure_text_;
  std::vector<std::byte> copy_k_, copy_v_;  // of host_copy()
  std::vector<std::byte> pieces_;           // of device_rows()
  FakeCodes* host_codes_ = nullptr;         // of the step with tensors of the host
  uint32_t host_layer_ = 0;
  const float* host_q_ = nullptr;
  std::atomic<uint64_t> merges_{0};
  std::atomic<uint64_t> begun_{0}, awaited_{0};  // steps, by the stream's caller and by the host
};

}  // namespace keyhole::test

// A device with streams that needs no GPU: a thread takes one launch after the other, as a stream does, and host memory
// is its memory. What it computes is the definition, in double precision or by the host device; what it signals is
// what gpu/step.h says. Faults can be planted.
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

#include "cpu/attention.h"
#include "gpu/device.h"
#include "runtime/engine/host_device.h"
#include "tests/runtime/exact_sums.h"
#include "tests/runtime/fake_codes.h"
#include "tests/runtime/fake_partitions.h"
#include "tests/runtime/fake_stream.h"

namespace keyhole::test {

/// What a device may refuse.
enum class DeviceCall {
  memory,  ///< to take device memory
  pinned,  ///< to pin host memory
  command  ///< a launch or a copy
};

struct FakeFaults {
  /// Called before each of them, and may throw what the device would.
  std::function<void(DeviceCall)> on_call = [](DeviceCall) {};
  std::atomic<bool> loses_queries{false};  ///< q never arrives
  std::atomic<bool> stalls{
      false};  ///< a head's state is never handed over, as of a worker that hangs
  std::atomic<bool> fails{false};  ///< no half of a step can be launched, as after a CUDA error
  std::atomic<bool> fails_to_end{false};     ///< a first half can, a second one cannot
  uint32_t timeout_ms = 2000;                ///< of waits on the device
  std::atomic<uint64_t> steps_of_tokens{0};  ///< of several tokens each
  std::atomic<bool> fails_together{false};   ///< steps of several sessions cannot be launched
  /// How many steps each launch of a group had, of all devices; by the threads that call.
  std::vector<uint32_t> launches_of_groups;
  /// Called by threads that wait for the queries of a step, while they do: to hold them up.
  std::function<void()> on_await = [] {};
  std::atomic<uint64_t> answers_kept{
      0};  ///< steps that were enqueued or captured to leave an answer for the host
  /// Called with an answer before it is written, o `[q_heads, head_dim]` and lse `[q_heads]`: to make it wrong.
  std::function<void(uint32_t layer, uint32_t sequence, float* o, float* lse)> on_answer =
      [](uint32_t, uint32_t, float*, float*) {};
};

/// Steps that wait for one another: of one kind, as all of a FakeStream's sessions are.
class FakeStepGroup final : public gpu::StepGroup {
 public:
  static constexpr uint32_t kMost = 4;  ///< of a launch

  explicit FakeStepGroup(FakeFaults& faults) : faults_(&faults) {}
  /// push: what pushes the step to its stream.
  void add(std::function<void()> push) { steps_.push_back(std::move(push)); }
  [[nodiscard]] uint32_t count() const override { return static_cast<uint32_t>(steps_.size()); }
  void launch(std::span<std::exception_ptr> errors) noexcept override {
    const std::vector<uint32_t> kinds(steps_.size());
    gpu::divide_steps<kMost>(kinds, [&](std::span<const uint32_t> numbers) {
      std::exception_ptr error;
      try {
        faults_->on_call(DeviceCall::command);
        if (faults_->fails_together) throw Error(Status::device_error, "planted: a launch failed");
        faults_->launches_of_groups.push_back(static_cast<uint32_t>(numbers.size()));
        for (const uint32_t i : numbers) steps_[i]();
      } catch (...) {
        error = std::current_exception();
      }
      for (const uint32_t i : numbers) errors[i] = error;
    });
    steps_.clear();
  }

 private:
  FakeFaults* faults_;
  std::vector<std::function<void()>> steps_;
};

class FakeDevice final : public gpu::Resident, public gpu::StreamSteps {
 public:
  FakeDevice(const gpu::ResidentShape& shape, const cpu::Kernels& kernels, FakeStream& stream,
             FakeFaults& faults)
      : shape_(shape),
        kernels_(&kernels),
        stream_(&stream),
        faults_(&faults),
        host_(shape, kernels),
        device_(shape, kernels),
        layers_(shape.layers) {
    for (Layer& l : layers_) {
      l.o.resize(size_t{shape.q_heads} * shape.head_dim);
      for (Rows& rows : l.rows) {
        const uint32_t tokens = gpu::most_step_tokens(shape.q_heads / shape.kv_heads);
        rows.q.resize(tokens * l.o.size());
        rows.k.resize(tokens * token_bytes());
        rows.v.resize(tokens * token_bytes());
      }
      l.lse.resize(shape.q_heads);
      l.delivered = std::vector<std::atomic<uint32_t>>(shape.kv_heads);
      l.ids.resize(shape.kv_heads);
      l.tail_o.resize(l.o.size());
      l.tail_lse.resize(shape.q_heads);
      for (Answer& answer : l.answers) {
        answer.o.resize(l.o.size());
        answer.lse.resize(shape.q_heads);
      }
    }
  }
  ~FakeDevice() override { stream_->wait(); }
  [[nodiscard]] const gpu::ResidentShape& shape() const { return shape_; }

  // Resident: both copies alike.
  void append_sink(uint32_t l, const std::byte* k, const std::byte* v, uint32_t n) override {
    command();
    wait_idle(l);
    host_.append_sink(l, k, v, n);
    device_.append_sink(l, k, v, n);
  }
  void append_window(uint32_t l, const std::byte* k, const std::byte* v, uint32_t n) override {
    command();
    wait_idle(l);
    host_.append_window(l, k, v, n);
    device_.append_window(l, k, v, n);
  }
  void evict(uint32_t l, std::byte* k, std::byte* v, uint32_t n) override {
    command();
    wait_idle(l);
    host_.evict(l, k, v, n);
    device_.evict(l, k, v, n);
  }
  void truncate(uint32_t l, uint32_t sink, uint32_t window) override {
    command();
    wait_idle(l);
    host_.truncate(l, sink, window);
    device_.truncate(l, sink, window);
  }
  uint32_t sink_count(uint32_t l) const override { return host_.sink_count(l); }
  uint32_t window_count(uint32_t l) const override { return host_.window_count(l); }
  using gpu::Resident::attend_begin;
  void attend_begin(uint32_t l, const float* q, gpu::Codes* codes) override {
    command();
    device_.attend_begin(l, q);
    for (uint32_t h = 0; h < shape_.kv_heads; ++h) device_.run_host_task(h);
    host_codes_ = static_cast<FakeCodes*>(codes);
    host_layer_ = l;
    host_q_ = q;
  }
  uint32_t host_tasks() const override { return 0; }
  void run_host_task(uint32_t) override {}
  StateView host_state(uint32_t) override { return {}; }
  void attend_end(StateView out) override {
    command();
    device_.attend_end(out);
    if (host_codes_ == nullptr) return;
    const uint32_t group = shape_.q_heads / shape_.kv_heads;
    const size_t size = size_t{group} * shape_.head_dim;
    std::vector<float> o(2 * size), lse(2 * group);
    for (uint32_t h = 0; h < shape_.kv_heads; ++h) {
      const StateView state{out.o + h * size, out.lse + h * group};
      std::copy_n(state.o, size, o.data());
      std::copy_n(state.lse, group, lse.data());
      const std::array<StateView, 2> states{StateView{o.data(), lse.data()},
                                            StateView{o.data() + size, lse.data() + group}};
      host_codes_->run(host_layer_, h, host_q_ + h * size, group, states[1]);
      cpu::merge_states(states, group, shape_.head_dim, state);
    }
  }
  void read(uint32_t l, std::byte* k, std::byte* v) const override { host_.read(l, k, v); }
  gpu::StreamSteps* stream_steps() override { return this; }

  // StreamSteps.
  void begin(uint32_t layer, const gpu::DeviceRows& q, const gpu::DeviceRows* k,
             const gpu::DeviceRows* v, const gpu::OnDevice& tokens, gpu::Stream) override {
    count_begun();
    Launch launch{layer,
                  q,
                  {},
                  {},
                  k != nullptr,
                  static_cast<FakePartitions*>(tokens.partitions),
                  static_cast<FakeCodes*>(tokens.codes),
                  tokens.keeps_answer};
    if (tokens.keeps_answer && !shape_.keeps_answers) {
      throw Error(Status::invalid_argument, "planted: there is no memory for answers");
    }
    if (tokens.keeps_answer) faults_->answers_kept += 1;
    if (k != nullptr) {
      launch.k = *k;
      launch.v = *v;
    }
    stream_->push([this, launch] { run_first_half(launch); });
  }
  void end(uint32_t layer, const gpu::DeviceRows& out, float* lse, gpu::Stream) override {
    command();
    if (faults_->fails_to_end) throw Error(Status::device_error, "planted: a launch failed");
    stream_->push([this, layer, out, lse] { run_second_half(layer, out, lse); });
  }
  void step(uint32_t layer, const gpu::DeviceRows& q, const gpu::DeviceRows* k,
            const gpu::DeviceRows* v, const gpu::OnDevice& tokens, const gpu::DeviceRows& out,
            float* lse, gpu::Stream stream) override {
    if (tokens.group != nullptr && tokens.codes != nullptr && !tokens.keeps_answer) {
      count_begun();
      const Launch launch{layer,
                          q,
                          k == nullptr ? q : *k,
                          v == nullptr ? q : *v,
                          k != nullptr,
                          nullptr,
                          static_cast<FakeCodes*>(tokens.codes),
                          false};
      static_cast<FakeStepGroup*>(tokens.group)->add([this, launch, out, lse] {
        stream_->push([this, launch] { run_first_half(launch); });
        stream_->push([this, layer = launch.layer, out, lse] { run_second_half(layer, out, lse); });
      });
      return;
    }
    begin(layer, q, k, v, tokens, stream);
    end(layer, out, lse, stream);
  }
  std::unique_ptr<gpu::StepGroup> make_group(uint32_t) override {
    return std::make_unique<FakeStepGroup>(*faults_);
  }
  void step_tokens(uint32_t layer, const gpu::ManyTokens& tokens, gpu::Codes& codes,
                   gpu::Stream) override {
    count_begun();
    faults_->steps_of_tokens += 1;
    const auto push = [this, layer, tokens, &codes] {
      stream_->push([this, layer, tokens, &codes] {
        run_tokens(layer, tokens, static_cast<FakeCodes&>(codes));
      });
    };
    if (tokens.group != nullptr) return static_cast<FakeStepGroup*>(tokens.group)->add(push);
    push();
  }
  void keep_newest(std::span<const uint32_t> layers, uint32_t of, std::span<const uint32_t> kept,
                   gpu::Stream) override {
    command();
    stream_->push([this, layers = std::vector<uint32_t>(layers.begin(), layers.end()), of,
                   kept = std::vector<uint32_t>(kept.begin(), kept.end())] {
      for (const uint32_t layer : layers) keep(device_, layer, of, kept);
    });
  }
  void keep_newest_of_copy(uint32_t layer, uint32_t of, std::span<const uint32_t> kept) override {
    keep(host_, layer, of, kept);
  }
  gpu::Signal signal() const override { return gpu::Signal::device_wait; }
  uint64_t capture_id(gpu::Stream) const override { return stream_->capture_id(); }
  bool await(uint32_t layer, uint32_t sequence, uint32_t, uint64_t timeout_us,
             const std::atomic<bool>& stop, gpu::Published& out) override {
    Layer& l = layers_[layer];
    if (timeout_us != 0) {
      awaited_ += 1;
      faults_->on_await();
    }
    if (!wait_for(l.published, sequence, timeout_us, stop)) return false;
    const Rows& rows = l.rows[sequence % 2];
    out = {rows.q.data(), rows.k.data(), rows.v.data()};
    return true;
  }
  bool chosen(uint32_t layer, uint32_t kv_head, uint32_t sequence, uint64_t timeout_us,
              const std::atomic<bool>& stop, gpu::Chosen& out) override {
    Layer& l = layers_[layer];
    if (!wait_for(l.chosen, sequence, timeout_us, stop)) return false;
    out = {l.ids[kv_head].data(), static_cast<uint32_t>(l.ids[kv_head].size())};
    return true;
  }
  StateView host_slot(uint32_t layer, uint32_t kv_head) override {
    const uint32_t group = shape_.q_heads / shape_.kv_heads;
    Layer& l = layers_[layer];
    return {l.o.data() + size_t{kv_head} * group * shape_.head_dim, l.lse.data() + kv_head * group};
  }
  void deliver(uint32_t layer, uint32_t kv_head, uint32_t sequence) override {
    if (faults_->stalls && kv_head == 0) return;
    layers_[layer].delivered[kv_head].store(sequence, std::memory_order_release);
  }
  void give_up(uint32_t layer, uint32_t sequence) override {
    layers_[layer].given_up.store(sequence, std::memory_order_release);
  }
  bool answer(uint32_t layer, uint32_t kv_head, uint32_t sequence, StateView& out) override {
    Layer& l = layers_[layer];
    if (!shape_.keeps_answers || !reached(l.answered.load(std::memory_order_acquire), sequence)) {
      return false;
    }
    const uint32_t group = shape_.q_heads / shape_.kv_heads;
    Answer& a = l.answers[sequence % 2];
    out = {a.o.data() + size_t{kv_head} * group * shape_.head_dim, a.lse.data() + kv_head * group};
    return true;
  }
  gpu::ResidentRows host_copy(uint32_t layer, uint32_t kv_head) override {
    // In two pieces, as if a ring's.
    const uint32_t n = host_.sink_count(layer) + host_.window_count(layer);
    copy_k_.resize(n * token_bytes());
    copy_v_.resize(copy_k_.size());
    host_.read(layer, copy_k_.data(), copy_v_.data());
    const size_t row = shape_.head_dim * dtype_size(shape_.dtype);
    gpu::ResidentRows rows;
    const auto add = [&](uint32_t first, uint32_t count) {
      if (count == 0) return;
      const auto view = [&](const std::vector<std::byte>& all) {
        return RowsView{all.data() + first * token_bytes() + kv_head * row, token_bytes(), count,
                        shape_.head_dim, shape_.dtype};
      };
      rows.pieces[rows.count++] = {view(copy_k_), view(copy_v_)};
    };
    add(0, n / 3);
    add(n / 3, n - n / 3);
    return rows;
  }
  uint32_t update_host_copy(uint32_t layer, const gpu::Published& p, std::byte* k,
                            std::byte* v) override {
    return take_in(host_, layer, p.k, p.v, k, v);
  }
  gpu::ResidentPieces device_rows(uint32_t layer) override {
    // In two pieces, as if a ring's; `[kv_heads][n, head_dim]` of both K and V.
    const uint32_t n = device_.sink_count(layer) + device_.window_count(layer);
    std::vector<std::byte> k(n * token_bytes()), v(k.size());
    device_.read(layer, k.data(), v.data());
    const size_t row = shape_.head_dim * dtype_size(shape_.dtype);
    pieces_.assign(2 * k.size(), std::byte{});
    for (uint32_t h = 0; h < shape_.kv_heads; ++h) {
      for (uint32_t t = 0; t < n; ++t) {
        const size_t to = (size_t{h} * n + t) * row, from = t * token_bytes() + h * row;
        std::copy_n(k.data() + from, row, pieces_.data() + to);
        std::copy_n(v.data() + from, row, pieces_.data() + k.size() + to);
      }
    }
    gpu::ResidentPieces all;
    const auto add = [&](uint32_t first, uint32_t count) {
      if (count == 0) return;
      const std::byte* const at = pieces_.data() + first * row;
      all.pieces[all.count++] = {at, at + k.size(), n * row, count, shape_.dtype, nullptr, true};
    };
    add(0, n / 3);
    add(n / 3, n - n / 3);
    return all;
  }
  void synchronize(gpu::Stream) override {
    stream_->synchronize();
    command();
  }
  Status failure(std::string& text) override {
    const std::lock_guard lock(mutex_);
    text = std::exchange(failure_text_, {});
    return std::exchange(failure_, Status::ok);
  }
  uint64_t wait_nanoseconds() const override { return 0; }
  uint64_t merges() const override { return merges_.load(); }
  /// As of a wait of its codes that ended in vain.
  void note_failure(Status status, const std::string& text) {
    const std::lock_guard lock(mutex_);
    failure_ = status;
    failure_text_ = text;
  }

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
    std::vector<float> o, lse, tail_o, tail_lse;
    std::vector<std::vector<uint32_t>> ids;
    uint32_t sequence = 0;  // the device's
    bool has_tail = false;
    bool has_codes = false;  // in place of a tail; the step does not wait for the host
    std::atomic<uint32_t> published{0}, attended{0}, chosen{0}, given_up{0};
    std::vector<std::atomic<uint32_t>> delivered;
    Layer() = default;
    Layer(Layer&&) noexcept {}
  };
  struct Launch {
    uint32_t layer;
    gpu::DeviceRows q, k, v;
    bool appends;
    FakePartitions* partitions;
    FakeCodes* codes;
    bool keeps_answer;
  };

  [[nodiscard]] size_t token_bytes() const {
    return size_t{shape_.kv_heads} * shape_.head_dim * dtype_size(shape_.dtype);
  }
  void command() const { faults_->on_call(DeviceCall::command); }
  /// A step is about to be enqueued, or cannot be.
  void count_begun() {
    if (stream_->capture_id() == 0) begun_ += 1;
    if (faults_->fails) {
      // Not before the host, which was told of the step, waits for it.
      while (awaited_ < begun_) std::this_thread::yield();
      throw Error(Status::device_error, "planted: a launch failed");
    }
    command();
  }
  static bool reached(uint32_t value, uint32_t wanted) {
    return static_cast<int32_t>(value - wanted) >= 0;
  }
  static bool wait_for(const std::atomic<uint32_t>& flag, uint32_t wanted, uint64_t timeout_us,
                       const std::atomic<bool>& stop) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(timeout_us);
    while (!reached(flag.load(std::memory_order_acquire), wanted)) {
      if (stop.load() || std::chrono::steady_clock::now() > end) return false;
      std::this_thread::yield();
    }
    return true;
  }
  uint32_t take_in(runtime::HostDevice& device, uint32_t layer, const std::byte* tk,
                   const std::byte* tv, std::byte* k, std::byte* v) {
    if (device.sink_count(layer) < shape_.sink) {
      device.append_sink(layer, tk, tv, 1);
      return 0;
    }
    uint32_t left = 0;
    if (device.window_count(layer) == shape_.window_capacity) {
      left = shape_.window_capacity - (shape_.window - 1);
      device.evict(layer, k, v, left);
    }
    device.append_window(layer, tk, tv, 1);
    return left;
  }
  void keep(runtime::HostDevice& device, uint32_t layer, uint32_t of,
            std::span<const uint32_t> kept) const {
    const uint32_t sink = device.sink_count(layer), window = device.window_count(layer);
    const uint32_t first = sink + window - of;
    std::vector<std::byte> k((sink + window) * token_bytes()), v(k.size());
    device.read(layer, k.data(), v.data());
    device.truncate(layer, std::min(sink, first), first - std::min(sink, first));
    for (const uint32_t number : kept) {
      const size_t at = (first + number) * token_bytes();
      if (device.sink_count(layer) < shape_.sink) {
        device.append_sink(layer, k.data() + at, v.data() + at, 1);
      } else {
        device.append_window(layer, k.data() + at, v.data() + at, 1);
      }
    }
  }
  /// Heads of a token in fp32, without gaps.
  void read_token(const gpu::DeviceTokens& from, uint32_t token, uint32_t heads, float* to) const {
    const size_t d = shape_.head_dim, element = dtype_size(from.dtype);
    for (uint32_t h = 0; h < heads; ++h) {
      const auto* row = static_cast<const std::byte*>(from.data) +
                        (token * from.token_stride + h * from.head_stride) * element;
      kernels_->to_f32[static_cast<int>(from.dtype)](row, to + h * d, d);
    }
  }
  void run_tokens(uint32_t layer, const gpu::ManyTokens& t, FakeCodes& codes) {
    if (faults_->loses_queries) return;
    Layer& l = layers_[layer];
    if (!await_host(l)) note_timeout();
    Rows& rows = l.rows[(l.sequence + 1) % 2];
    const size_t d = shape_.head_dim, q_size = l.o.size();
    const size_t kv_size = size_t{shape_.kv_heads} * d;
    std::vector<float> scratch(kv_size);
    for (uint32_t i = 0; i < t.tokens; ++i) {
      read_token(t.q, i, shape_.q_heads, rows.q.data() + i * q_size);
      for (const bool is_key : {true, false}) {
        std::byte* const to = (is_key ? rows.k : rows.v).data() + i * token_bytes();
        read_token(is_key ? t.k : t.v, i, shape_.kv_heads, scratch.data());
        kernels_->from_f32[static_cast<int>(shape_.dtype)](scratch.data(), to, kv_size);
      }
      std::vector<std::byte> k(token_bytes() * shape_.window_capacity), v(k.size());
      const std::byte* const key = rows.k.data() + i * token_bytes();
      (void)take_in(device_, layer, key, rows.v.data() + i * token_bytes(), k.data(), v.data());
    }
    l.sequence += 1;
    l.has_codes = true;
    l.published.store(l.sequence, std::memory_order_release);

    const uint32_t n = device_.sink_count(layer) + device_.window_count(layer);
    std::vector<std::byte> stored_k(n * token_bytes()), stored_v(stored_k.size());
    device_.read(layer, stored_k.data(), stored_v.data());
    std::vector<float> k(n * kv_size), v(n * kv_size);
    kernels_->to_f32[static_cast<int>(shape_.dtype)](stored_k.data(), k.data(), k.size());
    kernels_->to_f32[static_cast<int>(shape_.dtype)](stored_v.data(), v.data(), v.size());
    const uint32_t group = shape_.q_heads / shape_.kv_heads;
    for (uint32_t i = 0; i < t.tokens; ++i) {
      const float* const q = rows.q.data() + i * q_size;
      std::vector<float> o(q_size), lse(shape_.q_heads), coded(q_size), coded_lse(shape_.q_heads);
      for (uint32_t h = 0; h < shape_.q_heads; ++h) {
        std::vector<double> logits;
        std::vector<const float*> values;
        for (uint32_t token = 0; token < n; ++token) {
          const uint32_t first = n - t.drafts;
          if (token >= first && (t.sees[i] >> (token - first) & 1U) == 0) continue;
          const size_t at = token * kv_size + h / group * d;
          double x = exact_dot(q + h * d, k.data() + at, d);
          const LogitParams& of_layer = shape_.logits_of(layer);
          x *= double{of_layer.scale};
          const double cap = double{of_layer.softcap};
          logits.push_back(cap > 0 ? cap * std::tanh(x / cap) : x);
          values.push_back(v.data() + at);
        }
        const double top = *std::max_element(logits.begin(), logits.end());
        std::vector<double> sums(d);
        double sum = 0;
        for (size_t token = 0; token < logits.size(); ++token) {
          const double w = std::exp(logits[token] - top);
          sum += w;
          add_weighted(sums.data(), w, values[token], d);
        }
        for (uint32_t j = 0; j < d; ++j) o[h * d + j] = static_cast<float>(sums[j] / sum);
        lse[h] = static_cast<float>(top + std::log(sum));
      }
      for (uint32_t h = 0; h < shape_.kv_heads; ++h) {
        const size_t at = size_t{h} * group;
        codes.run(layer, h, q + at * d, group, {coded.data() + at * d, coded_lse.data() + at},
                  i == 0);
      }
      const std::array<StateView, 2> states{StateView{o.data(), lse.data()},
                                            StateView{coded.data(), coded_lse.data()}};
      std::vector<float> all(q_size), all_lse(shape_.q_heads);
      cpu::merge_states(states, shape_.q_heads, shape_.head_dim, {all.data(), all_lse.data()});
      for (uint32_t h = 0; h < shape_.q_heads; ++h) {
        auto* row = static_cast<std::byte*>(t.out.data) +
                    (i * t.out.token_stride + h * t.out.head_stride) * dtype_size(t.out.dtype);
        kernels_->from_f32[static_cast<int>(t.out.dtype)](all.data() + h * d, row, d);
      }
      if (t.lse != nullptr) std::copy(all_lse.begin(), all_lse.end(), t.lse + i * shape_.q_heads);
    }
    l.attended.store(l.sequence, std::memory_order_release);
    merges_.fetch_add(1);
  }
  void run_first_half(const Launch& launch) {
    if (faults_->loses_queries) return;
    Layer& l = layers_[launch.layer];
    // The host must have taken in the step before: nothing else keeps a step with codes from running ahead of it.
    if (launch.codes != nullptr && !await_host(l)) note_timeout();
    Rows& rows = l.rows[(l.sequence + 1) % 2];
    const uint32_t d = shape_.head_dim;
    for (uint32_t h = 0; h < shape_.q_heads; ++h) {
      const auto* row = static_cast<const std::byte*>(launch.q.data) +
                        h * launch.q.head_stride * dtype_size(launch.q.dtype);
      kernels_->to_f32[static_cast<int>(launch.q.dtype)](row, rows.q.data() + size_t{h} * d, d);
    }
    std::vector<float> scratch(d);
    const auto round = [&](const gpu::DeviceRows& from, std::byte* to) {
      for (uint32_t h = 0; h < shape_.kv_heads; ++h) {
        const auto* row = static_cast<const std::byte*>(from.data) +
                          h * from.head_stride * dtype_size(from.dtype);
        kernels_->to_f32[static_cast<int>(from.dtype)](row, scratch.data(), d);
        kernels_->from_f32[static_cast<int>(shape_.dtype)](
            scratch.data(), to + size_t{h} * d * dtype_size(shape_.dtype), d);
      }
    };
    if (launch.appends) {
      round(launch.k, rows.k.data());
      round(launch.v, rows.v.data());
      std::vector<std::byte> k(token_bytes() * shape_.window_capacity), v(k.size());
      (void)take_in(device_, launch.layer, rows.k.data(), rows.v.data(), k.data(), v.data());
    }
    l.sequence += 1;
    l.published.store(l.sequence, std::memory_order_release);
    l.has_tail = launch.partitions != nullptr || launch.codes != nullptr;
    l.has_codes = launch.codes != nullptr;
    l.keeps_answer = launch.keeps_answer;
    const uint32_t group = shape_.q_heads / shape_.kv_heads;
    if (launch.partitions != nullptr) {
      for (uint32_t h = 0; h < shape_.kv_heads; ++h) {
        const size_t at = size_t{h} * group;
        l.ids[h] = launch.partitions->run(launch.layer, h, rows.q.data() + at * d, group, *kernels_,
                                          {l.tail_o.data() + at * d, l.tail_lse.data() + at});
      }
      l.chosen.store(l.sequence, std::memory_order_release);
    }
    if (launch.codes != nullptr) {
      for (uint32_t h = 0; h < shape_.kv_heads; ++h) {
        const size_t at = size_t{h} * group;
        launch.codes->run(launch.layer, h, rows.q.data() + at * d, group,
                          {l.tail_o.data() + at * d, l.tail_lse.data() + at});
      }
    }
    device_.attend_begin(launch.layer, rows.q.data());
    for (uint32_t h = 0; h < shape_.kv_heads; ++h) device_.run_host_task(h);
    l.attended.store(l.sequence, std::memory_order_release);
  }
  /// Until the layer's newest published step no longer reads K and V.
  void wait_idle(uint32_t layer) const {
    const Layer& l = layers_[layer];
    const uint32_t published = l.published.load(std::memory_order_acquire);
    while (!reached(l.attended.load(std::memory_order_acquire), published)) {
      std::this_thread::yield();
    }
  }
  /// Until the host has acknowledged the layer's last step.
  bool await_host(const Layer& l) {
    const auto end =
        std::chrono::steady_clock::now() + std::chrono::milliseconds(faults_->timeout_ms);
    for (const auto& head : l.delivered) {
      while (!reached(head.load(std::memory_order_acquire), l.sequence)) {
        if (l.given_up.load(std::memory_order_acquire) == l.sequence) return true;
        if (std::chrono::steady_clock::now() > end) return false;
        std::this_thread::yield();
      }
    }
    return true;
  }
  void note_timeout() {
    const std::lock_guard lock(mutex_);
    failure_ = Status::timeout;
    failure_text_ = "the host did not answer";
  }
  void run_second_half(uint32_t layer, const gpu::DeviceRows& out, float* lse) {
    Layer& l = layers_[layer];
    const uint32_t group = shape_.q_heads / shape_.kv_heads;
    const uint32_t d = shape_.head_dim;
    const auto end =
        std::chrono::steady_clock::now() + std::chrono::milliseconds(faults_->timeout_ms);
    bool ok = !faults_->loses_queries;
    for (uint32_t h = 0; ok && !l.has_codes && h < shape_.kv_heads; ++h) {
      while (ok && !reached(l.delivered[h].load(std::memory_order_acquire), l.sequence)) {
        if (l.given_up.load(std::memory_order_acquire) == l.sequence) ok = false;
        if (ok && std::chrono::steady_clock::now() > end) {
          ok = false;
          note_timeout();
        }
        std::this_thread::yield();
      }
    }
    std::vector<float> o(l.o.size(), std::nanf("")), sums(l.lse.size(), std::nanf(""));
    for (uint32_t h = 0; ok && h < shape_.kv_heads; ++h) {
      const size_t at = size_t{h} * group;
      std::vector<StateView> states{device_.host_state(h)};
      if (!l.has_codes) states.push_back({l.o.data() + at * d, l.lse.data() + at});
      if (l.has_tail) states.push_back({l.tail_o.data() + at * d, l.tail_lse.data() + at});
      cpu::merge_states(states, group, d, {o.data() + at * d, sums.data() + at});
    }
    faults_->on_answer(layer, l.sequence, o.data(), sums.data());
    if (l.keeps_answer) {
      l.answers[l.sequence % 2] = {o, sums};
      l.answered.store(l.sequence, std::memory_order_release);
    }
    for (uint32_t h = 0; h < shape_.q_heads; ++h) {
      auto* row = static_cast<std::byte*>(out.data) + h * out.head_stride * dtype_size(out.dtype);
      kernels_->from_f32[static_cast<int>(out.dtype)](o.data() + size_t{h} * d, row, d);
    }
    if (lse != nullptr) std::copy(sums.begin(), sums.end(), lse);
    merges_.fetch_add(1);
  }

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

#include "tools/llama/gpu_decoder.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <vector>

#include "tools/llama/cuda/device_model.h"
#include "tools/llama/cuda/gpu_extension.h"
#include "tools/llama/cuda/graph.h"
#include "tools/llama/cuda/step_layers.h"
#include "tools/llama/gpu_sizes.h"

namespace keyhole::tools {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// The GPU's clock at the ends of a layer's phases.
struct LayerMarks {
  cuda::Event begin{cudaEventDefault}, projected{cudaEventDefault}, attended{cudaEventDefault},
      added{cudaEventDefault}, end{cudaEventDefault};
};

double seconds_between(const cuda::Event& from, const cuda::Event& to) {
  float milliseconds = 0.0F;
  cuda::check(cudaEventElapsedTime(&milliseconds, from.get(), to.get()), "the GPU's clock");
  return 1e-3 * milliseconds;
}

/// A step with marks is enqueued kernel by kernel, as events do not go into the graph: of an 8B model it takes some 4
/// ms more.
constexpr uint64_t kStepsPerMeasurement = 64;

}  // namespace

class GpuDecoder::Steps {
 public:
  Steps(const GpuModel& model, KeyholeCache& cache, HeldTokens held)
      : model_(model),
        config_(model.host().config),
        cache_(cache),
        tokens_(held.count),
        rope_tokens_(held.rope_tokens),
        logits_(config_.vocab_size),
        layers_(model, held.rope_tokens),
        input_(1),
        qkv_(config_.q_width() + 2 * config_.kv_width()),
        attended_(config_.q_width()),
        own_attended_(cache.shares_heads() ? config_.q_width() : 0),
        device_logits_(config_.vocab_size),
        host_input_(1),
        host_qkv_(qkv_.size()),
        host_attended_(attended_.size()),
        host_logits_(config_.vocab_size),
        marks_(config_.layers) {
    if (!cache_.on_device()) return;
    cache_.use_stream(stream_.get());
    capturable_ = cache_.can_be_captured();
  }
  ~Steps() {
    if (!cache_.on_device()) return;
    try {
      cache_.use_stream(nullptr);  // this one is about to end
    } catch (const std::exception&) {
      // The step has already reported what went wrong on it.
    }
  }
  Steps(const Steps&) = delete;
  Steps& operator=(const Steps&) = delete;

  std::span<const float> prefill(std::span<const uint32_t> tokens,
                                 const PrefillProgress& progress) {
    if (cache_.on_device()) {
      const auto take = [this](const DeviceLayerChunk& chunk) { cache_.prefill(chunk); };
      logits_ = gpu_prefill_to_device(model_, tokens, {cache_.kv_type(), take, cache_.kv_share()},
                                      progress);
    } else {
      const auto take = [this](const LayerChunk& chunk) { cache_.prefill(chunk); };
      logits_ = gpu_prefill(model_, tokens, take, progress);
    }
    tokens_ = static_cast<uint32_t>(tokens.size());
    rope_tokens_ = tokens.size();
    layers_.set_rope(rope_tokens_);
    return logits_;
  }

  [[nodiscard]] size_t tokens_at_once() const {
    return hook_ || (cache_.on_device() && cache_.shares_heads()) ? 1 : at_once_;
  }
  void take_at_once(size_t tokens) { at_once_ = tokens; }

  std::span<const float> extend(std::span<const uint32_t> tokens) {
    logits_ = gpu_extend(model_, cache_, tokens, tokens_, rope_tokens_, stream_.get());
    tokens_ += static_cast<uint32_t>(tokens.size());
    return logits_;
  }

  std::span<const float> step(uint32_t token) {
    check_tokens(config_, {&token, 1});
    layers_.check_position(tokens_);
    const Clock::time_point start = Clock::now();
    hook_seconds_ = 0.0;
    measuring_ = times_.steps % kStepsPerMeasurement == 0;
    *host_input_.get() = {token, tokens_};
    if (measuring_ || !capturable_ || !enqueued() || !launch_captured()) run_step();
    if (enqueued()) {
      cache_.synchronize();
    } else if (cache_.on_device()) {
      cache_.meet_ranks();
    }
    cuda::check(cudaStreamSynchronize(stream_.get()), "a step");
    if (measuring_) measure();
    count(seconds_since(start) - hook_seconds_);
    ++tokens_;
    return {host_logits_.get(), logits_.size()};
  }

  void truncate(uint32_t tokens) {
    cache_.truncate(tokens);
    tokens_ = std::min(tokens_, tokens);
  }

  [[nodiscard]] uint32_t tokens() const { return tokens_; }
  [[nodiscard]] size_t rope_tokens() const { return rope_tokens_; }
  [[nodiscard]] bool turns_otherwise(size_t tokens) const {
    return tools::turns_otherwise(config_, rope_tokens_, tokens);
  }
  void set_hook(AttentionHook hook) { hook_ = std::move(hook); }
  [[nodiscard]] const StepTimes& times() const { return times_; }
  void reset_times() { times_ = {}; }

 private:
  [[nodiscard]] bool enqueued() const { return cache_.on_device() && !hook_; }

  /// The step as one launch: enqueueing its 5 or 6 kernels a layer one by one takes 150 us of a host thread for 6
  /// layers, during which the threads that search lack a core. False where there is no graph that is up to date: after
  /// the first step, and after each that follows a change of the session, one is captured.
  bool launch_captured() {
    if (capture_next_) {
      capture_next_ = false;
      graph_.capture(stream_.get(), [this] { run_step(); });
      captured_ = true;
    }
    if (!captured_ || !cache_.announce()) {
      capture_next_ = true;
      return false;
    }
    graph_.launch(stream_.get());
    return true;
  }

  /// Enqueues a step, from the token in host_input_ to the logits in host_logits_.
  void run_step() {
    const cudaStream_t s = stream_.get();
    cuda::check(cudaMemcpyAsync(input_.get(), host_input_.get(), sizeof(cuda::StepInput),
                                cudaMemcpyHostToDevice, s),
                "the token");
    layers_.begin(input_.get(), s);
    for (uint32_t layer = 0; layer < config_.layers; ++layer) run_layer(layer);
    layers_.logits(device_logits_.get(), s);
    mark(end_);
    cuda::check(cudaMemcpyAsync(host_logits_.get(), device_logits_.get(),
                                logits_.size() * sizeof(float), cudaMemcpyDeviceToHost, s),
                "the logits");
  }

  void run_layer(uint32_t number) {
    const LayerMarks& marks = marks_[number];
    const cudaStream_t s = stream_.get();
    mark(marks.begin);
    layers_.project(number, qkv_.get(), s);
    mark(marks.projected);
    // The hook is not called for sliding layers, whose tokens stay on the device.
    if (enqueued() || (cache_.on_device() && config_.slides(number))) {
      const float* const k = qkv_.get() + config_.q_width();
      cache_.enqueue_attend(number, qkv_.get(), k, k + config_.kv_width(), attended_.get(),
                            own_attended_.get());
    } else {
      attend_on_host(number);
    }
    mark(marks.attended);
    layers_.add_attended(number, attended_.get(), s);
    mark(marks.added);
    layers_.mlp(number, s);
    mark(marks.end);
  }

  /// q, k and v to the host, Keyhole there, the output back.
  void attend_on_host(uint32_t layer) {
    const cudaStream_t s = stream_.get();
    cuda::check(cudaMemcpyAsync(host_qkv_.get(), qkv_.get(), qkv_.size() * sizeof(float),
                                cudaMemcpyDeviceToHost, s),
                "queries to the host");
    // Sliding layers, whose heads are gathered on the stream, may stand before this one.
    if (cache_.on_device()) cache_.meet_ranks();
    cuda::check(cudaStreamSynchronize(s), "a step");
    const float* const q = host_qkv_.get();
    const float* const k = q + config_.q_width();
    cache_.attend(layer, q, k, k + config_.kv_width(), host_attended_.get());
    if (hook_ && !config_.slides(layer)) {
      const Clock::time_point start = Clock::now();
      hook_(layer, q, host_attended_.get());
      hook_seconds_ += seconds_since(start);
    }
    cuda::check(cudaMemcpyAsync(attended_.get(), host_attended_.get(),
                                attended_.size() * sizeof(float), cudaMemcpyHostToDevice, s),
                "attention to the GPU");
  }

  void mark(const cuda::Event& event) const {
    if (measuring_) event.record(stream_.get());
  }

  void measure() {
    model_.note_memory();
    latest_ = {};
    for (const LayerMarks& marks : marks_) {
      latest_.projections += seconds_between(marks.begin, marks.projected) +
                             seconds_between(marks.attended, marks.added);
      latest_.mlp += seconds_between(marks.added, marks.end);
    }
    latest_.logits = seconds_between(marks_.back().end, end_);
  }

  void count(double seconds) {
    const double others = std::min(seconds, latest_.projections + latest_.mlp + latest_.logits);
    times_.projections += latest_.projections;
    times_.mlp += latest_.mlp;
    times_.logits += latest_.logits;
    times_.attention += seconds - others;
    ++times_.steps;
  }

  const GpuModel& model_;
  const LlamaConfig& config_;
  KeyholeCache& cache_;
  uint32_t tokens_;
  size_t rope_tokens_;
  size_t at_once_ = kGpuTokensAtOnce;
  std::vector<float> logits_;
  AttentionHook hook_;
  StepTimes times_, latest_;
  double hook_seconds_ = 0.0;
  bool measuring_ = false;
  bool capturable_ = false, capture_next_ = false, captured_ = false;
  cuda::OwnStream stream_;
  cuda::StepLayers layers_;
  cuda::Buffer<cuda::StepInput> input_;
  cuda::Buffer<float> qkv_, attended_, own_attended_, device_logits_;
  cuda::Pinned<cuda::StepInput> host_input_;
  cuda::Pinned<float> host_qkv_, host_attended_, host_logits_;
  std::vector<LayerMarks> marks_;
  cuda::Event end_{cudaEventDefault};
  cuda::Graph graph_;
};

GpuDecoder::GpuDecoder(const GpuModel& model, KeyholeCache& cache, HeldTokens held)
    : steps_(std::make_unique<Steps>(model, cache, held)) {}
GpuDecoder::~GpuDecoder() = default;

std::span<const float> GpuDecoder::prefill(std::span<const uint32_t> tokens,
                                           const PrefillProgress& progress) {
  return steps_->prefill(tokens, progress);
}
std::span<const float> GpuDecoder::step(uint32_t token) { return steps_->step(token); }
std::span<const float> GpuDecoder::extend(std::span<const uint32_t> tokens) {
  if (tokens.size() < 2 || tokens_at_once() == 1) return Decoder::extend(tokens);
  if (tokens.size() > tokens_at_once()) {
    throw std::runtime_error(std::to_string(tokens.size()) +
                             " tokens at once; allowed: " + std::to_string(tokens_at_once()));
  }
  return steps_->extend(tokens);
}
size_t GpuDecoder::tokens_at_once() const { return steps_->tokens_at_once(); }
void GpuDecoder::take_at_once(size_t tokens) { steps_->take_at_once(tokens); }
void GpuDecoder::truncate(uint32_t tokens) { steps_->truncate(tokens); }
uint32_t GpuDecoder::tokens() const { return steps_->tokens(); }
size_t GpuDecoder::rope_tokens() const { return steps_->rope_tokens(); }
bool GpuDecoder::turns_otherwise(size_t tokens) const { return steps_->turns_otherwise(tokens); }
void GpuDecoder::set_attention_hook(AttentionHook hook) { steps_->set_hook(std::move(hook)); }
const StepTimes& GpuDecoder::times() const { return steps_->times(); }
void GpuDecoder::reset_times() { steps_->reset_times(); }

}  // namespace keyhole::tools

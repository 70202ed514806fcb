#include "gpu/cuda/resident/cuda_resident.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "gpu/cuda/codes/cuda_codes.h"
#include "gpu/cuda/common/supported_device.h"
#include "gpu/cuda/common/waiting.h"

namespace keyhole::gpu {
namespace {

[[noreturn]] void refuse(const std::string& text) {
  throw Error(Status::invalid_argument, "resident tokens on a CUDA device: " + text);
}

void check_shape(const ResidentShape& s) {
  if (s.layers == 0 || s.kv_heads == 0 || s.q_heads == 0) refuse("no layers or no heads");
  if (!s.shapes.empty()) refuse("layers of different shapes; allowed is one");
  if (s.q_heads % s.kv_heads != 0 || s.q_heads / s.kv_heads > kMaxDeviceGroup) {
    refuse(std::to_string(s.q_heads) + " query heads for " + std::to_string(s.kv_heads) +
           " KV heads; allowed are 1 to 16 each");
  }
  if (!is_device_head_dim(s.head_dim)) {
    refuse("head dimension " + std::to_string(s.head_dim) + "; allowed are 64, 80, 96, 128, 256");
  }
  if (s.dtype != DType::f32 && s.dtype != DType::f16 && s.dtype != DType::bf16) {
    refuse(std::string("dtype ") + dtype_name(s.dtype) + "; allowed are f32, f16, bf16");
  }
  if (s.window > s.window_capacity) {
    refuse("a window of " + std::to_string(s.window) + " tokens in " +
           std::to_string(s.window_capacity) + " slots");
  }
  // Token numbers are 32 bits wide, also after rounding up to tiles.
  constexpr uint64_t kMostSlots = uint64_t{1} << 30U;
  if (uint64_t{s.sink} + s.window_capacity > kMostSlots) {
    refuse(std::to_string(uint64_t{s.sink} + s.window_capacity) + " slots; allowed are 2^30");
  }
}

/// The device has kernels.
const CudaConfig& usable(const CudaConfig& config) {
  require_device(config.ordinal, "resident tokens on a CUDA device");
  return config;
}

bool launches_block() {
  const char* value = std::getenv("CUDA_LAUNCH_BLOCKING");
  return value != nullptr && std::string(value) != "0" && *value != '\0';
}

}  // namespace

CudaResident::CudaResident(const ResidentShape& shape, const CudaConfig& config,
                           const std::shared_ptr<SessionOnDevice>& session)
    : shape_((check_shape(shape), shape)),
      config_(usable(config)),
      memory_(config.ordinal, session),
      ring_{shape.sink, shape.window_capacity, shape.window == 0 ? 0 : shape.window - 1},
      layout_(shape),
      scratch_layout_(shape),
      row_bytes_(size_t{shape.kv_heads} * shape.head_dim * dtype_size(shape.dtype)),
      mirror_(ring_, shape.layers, row_bytes_),
      layers_(shape.layers) {
  const DeviceScope device(config_.ordinal);
  const BesideCapture beside;
  memory_.claim(cuda_resident_bytes(shape_), "sink and window");
  launcher_ = std::make_unique<StepLauncher>(shape_);
  kv_ = DeviceBuffer(resident_bytes(shape_));
  scratch_ = DeviceBuffer(scratch_layout_.bytes());
  scratch_.clear();
  pinned_ = PinnedBuffer(layout_.bytes());
  staging_ = PinnedBuffer(staging_bytes(shape_));
  own_ = std::make_unique<OwnStream>();
  for (auto& event : staged_) event = std::make_unique<Event>();

  signal_ = memory_.session()->signal.value_or(config_.signal);
  if (memory_.session()->signal) return;
  if (config_.probe_signal) {
    signal_ = !launches_block() && probe_device_wait(own_->get()) ? Signal::device_wait
                                                                  : Signal::host_launch;
  } else if (signal_ == Signal::device_wait && launches_block()) {
    throw Error(Status::unsupported,
                "a device that waits for the host, with CUDA_LAUNCH_BLOCKING set: the launch would "
                "wait for its own end; allowed is Signal::host_launch");
  }
  memory_.session()->signal = signal_;
}

CudaResident::~CudaResident() {
  // Kernels that still wait for the host are given up: freeing their memory would wait until they time out.
  CudaResident::give_up_all();
  (void)cudaStreamSynchronize(own_->get());
}

void CudaResident::give_up_all() {
  for (uint32_t layer = 0; layer < shape_.layers; ++layer) {
    constexpr uint32_t kFarAhead = 1U << 30U;
    give_up(layer, layers_[layer].awaited.load() + kFarAhead);
  }
}

ResidentPlace CudaResident::place() const {
  return {config_.ordinal, memory_.session(), shape_,
          RowWaits{pinned_.device<FailureLine>(layout_.failure()),
                   scratch_.as<WaitSums>(scratch_layout_.waited()),
                   uint64_t{config_.timeout_ms} * 1'000'000}};
}

// --- rows of the host --------------------------------------------------------------------------------

size_t CudaResident::layer_bytes() const {
  return 2 * row_bytes_ * (size_t{shape_.sink} + shape_.window_capacity);
}

uint32_t CudaResident::sink_count(uint32_t layer) const { return mirror_.state(layer).sink; }
uint32_t CudaResident::window_count(uint32_t layer) const { return mirror_.state(layer).window; }

void CudaResident::copy_back(size_t from, void* to, size_t bytes) const {
  const std::lock_guard lock(copy_mutex_);
  const DeviceScope device(config_.ordinal);
  const BesideCapture beside;
  std::byte* pinned = pinned_.data() + layout_.copied();
  check(cudaMemcpyAsync(pinned, scratch_.data() + from, bytes, cudaMemcpyDeviceToHost, own_->get()),
        "copying a state back");
  own_->wait("copying a state back");
  std::memcpy(to, pinned, bytes);
}

void CudaResident::wait_idle(uint32_t layer) {
  const uint32_t awaited = layers_[layer].awaited.load(std::memory_order_relaxed);
  if (layers_[layer].idle_after == awaited) return;
  // The last block of a head to look at K and V counts the head's state up to the step.
  std::vector<RingState> states(shape_.kv_heads);
  const auto ready = [&] {
    copy_back(scratch_layout_.states(layer), states.data(), states.size() * sizeof(RingState));
    return std::all_of(states.begin(), states.end(), [&](const RingState& state) {
      return has_reached(state.sequence, awaited);
    });
  };
  const uint64_t patience_us = uint64_t{config_.timeout_ms} * 1000;
  if (!wait_until(ready, patience_us, patience_us, [] { return false; })) {
    throw Error(Status::timeout, "layer " + std::to_string(shape_.number_of(layer)) +
                                     ": the device has not ended " + "its part of step " +
                                     std::to_string(awaited) + " within " +
                                     std::to_string(config_.timeout_ms) + " ms");
  }
  layers_[layer].idle_after = awaited;
}

void CudaResident::append(uint32_t layer, uint32_t first, const std::byte* k, const std::byte* v,
                          uint32_t n) {
  const DeviceScope device(config_.ordinal);
  const BesideCapture beside;
  AppendParams p;
  p.ring = ring_;
  p.after = mirror_.state(layer);
  p.states = scratch_.as<RingState>(scratch_layout_.states(layer));
  p.kv = kv_.data() + layer * layer_bytes();
  p.kv_heads = shape_.kv_heads;
  p.row_bytes = static_cast<uint32_t>(row_bytes_ / shape_.kv_heads);

  const size_t half_bytes = staging_.bytes() / 2;
  const auto at_once = static_cast<uint32_t>(
      std::min<size_t>(n, std::max<size_t>(1, half_bytes / (2 * row_bytes_))));
  for (uint32_t done = 0; done < n; done += p.n) {
    p.n = std::min(at_once, n - done);
    p.first = first + done;
    staged_[half_]->wait("copying rows to the device");
    std::byte* to = staging_.data() + half_ * half_bytes;
    std::memcpy(to, k + done * row_bytes_, p.n * row_bytes_);
    std::memcpy(to + p.n * row_bytes_, v + done * row_bytes_, p.n * row_bytes_);
    p.from = staging_.device(half_ * half_bytes);
    launch_append(p, own_->get());
    staged_[half_]->record(own_->get());
    half_ ^= 1U;
  }
  if (n == 0) launch_append(p, own_->get());
  own_is_busy_ = true;
  // A graph is launched without a call to this class: its steps must find the rows in place.
  if (streams_used_) finish_own();
}

void CudaResident::append_sink(uint32_t layer, const std::byte* k, const std::byte* v, uint32_t n) {
  if (n == 0) return;
  wait_idle(layer);
  const uint32_t first = mirror_.state(layer).sink;
  mirror_.append_sink(layer, k, v, n);
  append(layer, first, k, v, n);
}

void CudaResident::append_window(uint32_t layer, const std::byte* k, const std::byte* v,
                                 uint32_t n) {
  if (n == 0) return;
  wait_idle(layer);
  const uint32_t first = mirror_.state(layer).tokens();
  mirror_.append_window(layer, k, v, n);
  append(layer, first, k, v, n);
}

void CudaResident::publish_state(uint32_t layer) { append(layer, 0, nullptr, nullptr, 0); }

void CudaResident::evict(uint32_t layer, std::byte* k, std::byte* v, uint32_t n) {
  if (n == 0) return;
  wait_idle(layer);
  mirror_.evict(layer, k, v, n);
  publish_state(layer);
}

void CudaResident::truncate(uint32_t layer, uint32_t sink, uint32_t window) {
  wait_idle(layer);
  mirror_.truncate(layer, sink, window);
  publish_state(layer);
}

void CudaResident::read(uint32_t layer, std::byte* k, std::byte* v) const {
  mirror_.read(layer, 0, mirror_.state(layer).tokens(), k, v);
}

// --- steps with tensors of the host ----------------------------------------------------------------

void CudaResident::attend_begin(uint32_t layer, const float* q, Codes* codes) {
  wait_idle(layer);
  const DeviceScope device(config_.ordinal);
  const BesideCapture beside;
  // By a copy, not read from the host by the kernel: its hundreds of blocks would each fetch q over the bus.
  std::memcpy(pinned_.data() + layout_.host_q(), q, layout_.q_bytes());
  auto* device_q = scratch_.as<float>(scratch_layout_.host_q());
  check(cudaMemcpyAsync(device_q, pinned_.data() + layout_.host_q(), layout_.q_bytes(),
                        cudaMemcpyHostToDevice, own_->get()),
        "copying q to the device");

  StepParams p = step_params(layer);
  p.q = {device_q, shape_.head_dim, DType::f32};
  p.counts = false;
  p.arrivals = scratch_.as<uint32_t>(scratch_layout_.arrivals(StepQueue::host));
  p.partial_o = scratch_.as<float>(scratch_layout_.partial_o(StepQueue::host));
  p.partial_states = scratch_.as<AttentionState>(scratch_layout_.partial_states(StepQueue::host));
  p.resident_o = pinned_.device<float>(layout_.host_o());
  p.resident_lse = pinned_.device<float>(layout_.host_lse());
  p.done = pinned_.device<PublishedLine>(layout_.host_done(0));
  p.ticket = ++ticket_;
  host_step_has_codes_ = codes != nullptr;
  if (codes != nullptr) {
    // Their state, with the resident one in it, goes where that one would have gone.
    const DeviceRows rows{device_q, shape_.head_dim, DType::f32};
    const DeviceRows out{p.resident_o, shape_.head_dim, DType::f32};
    static_cast<CudaCodes*>(codes)->step(layer, rows, p, out, p.resident_lse, own_->get());
  } else {
    launcher_->launch(p, own_->get());
  }
  own_is_busy_ = true;
}

void CudaResident::attend_end(StateView out) {
  const DeviceScope device(config_.ordinal);
  const BesideCapture beside;
  const auto* done = pinned_.as<PublishedLine>(layout_.host_done(0));
  uint32_t head = 0;
  const auto ready = [&] {
    if (host_step_has_codes_) return cudaStreamQuery(own_->get()) == cudaSuccess;
    while (head < shape_.kv_heads && has_reached(load_acquire(done[head].sequence), ticket_)) {
      ++head;
    }
    return head == shape_.kv_heads;
  };
  // A kernel that failed raises no flag: look at the stream now and then.
  constexpr uint64_t kSpinUs = 2000;
  cudaError_t error = cudaSuccess;
  const auto failed = [&] {
    error = cudaStreamQuery(own_->get());
    if (error == cudaErrorNotReady) error = cudaSuccess;
    return error != cudaSuccess;
  };
  if (!wait_until(ready, kSpinUs, uint64_t{config_.timeout_ms} * 1000, failed)) {
    check(error, "the resident attention");
    throw Error(Status::timeout, "the resident attention has not ended within " +
                                     std::to_string(config_.timeout_ms) + " ms");
  }
  std::memcpy(out.o, pinned_.data() + layout_.host_o(), layout_.q_bytes());
  std::memcpy(out.lse, pinned_.data() + layout_.host_lse(), shape_.q_heads * sizeof(float));
}

StepParams CudaResident::step_params(uint32_t layer) const {
  StepParams p;
  p.ring = ring_;
  p.logits = shape_.logits_of(layer);
  p.kv_heads = shape_.kv_heads;
  p.group = shape_.q_heads / shape_.kv_heads;
  p.kv = kv_.data() + layer * layer_bytes();
  p.dtype = shape_.dtype;
  p.states = scratch_.as<RingState>(scratch_layout_.states(layer));
  p.published = pinned_.device<PublishedLine>(layout_.published(layer, 0));
  p.rows = pinned_.device(layout_.rows(layer, 0));
  p.rows_bytes = layout_.rows_bytes();
  p.q_bytes = layout_.q_place();
  p.kv_bytes = layout_.kv_place();
  p.arrivals = scratch_.as<uint32_t>(scratch_layout_.arrivals(StepQueue::stream));
  p.ready = scratch_.as<uint32_t>(scratch_layout_.ready());
  p.host_states = scratch_.as<float>(scratch_layout_.host_states());
  p.numbers = scratch_.as<uint32_t>(scratch_layout_.numbers(layer));
  p.partial_o = scratch_.as<float>(scratch_layout_.partial_o(StepQueue::stream));
  p.partial_states = scratch_.as<AttentionState>(scratch_layout_.partial_states(StepQueue::stream));
  p.resident_o = scratch_.as<float>(scratch_layout_.resident_o(layer));
  p.resident_lse = scratch_.as<float>(scratch_layout_.resident_lse(layer));
  return p;
}

}  // namespace keyhole::gpu

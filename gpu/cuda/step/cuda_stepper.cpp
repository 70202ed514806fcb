// CudaStepper but for steps on a caller's stream (stream_steps.cpp): what a session makes, and its steps with tensors
// of the host.
#include "gpu/cuda/step/cuda_stepper.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "gpu/cuda/codes/cuda_codes.h"
#include "gpu/cuda/common/device_scope.h"
#include "gpu/cuda/common/supported_device.h"
#include "gpu/cuda/common/waiting.h"
#include "gpu/cuda/exchange/signal_probe.h"
#include "gpu/cuda/step/codes_steps.h"

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
    refuse("head dimension " + std::to_string(s.head_dim) + "; allowed are " + kDeviceHeadDims);
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

CudaStepper::CudaStepper(const ResidentShape& shape, const CudaConfig& config,
                         const std::shared_ptr<SessionOnDevice>& session)
    : shape_((check_shape(shape), shape)),
      config_(usable(config)),
      memory_(config.ordinal, session),
      layers_(shape.layers) {
  const DeviceScope device(config_.ordinal);
  const BesideCapture beside;
  memory_.claim(cuda_resident_bytes(shape_), "sink and window");
  launcher_ = std::make_unique<StepLauncher>(shape_);
  exchange_ = std::make_unique<HostExchange>(shape_, config_.timeout_ms);
  store_ = std::make_unique<ResidentStore>(shape_, config_.ordinal, *exchange_);
  choose_signal();
}

CudaStepper::~CudaStepper() {
  // Kernels that still wait for the host are given up: freeing their memory would wait until they time out.
  exchange_->give_up_all();
}

void CudaStepper::choose_signal() {
  std::optional<Signal>& chosen = memory_.session()->signal;
  signal_ = chosen.value_or(config_.signal);
  if (chosen) return;
  if (config_.probe_signal) {
    signal_ = !launches_block() && probe_device_wait(store_->own_stream()) ? Signal::device_wait
                                                                           : Signal::host_launch;
  } else if (signal_ == Signal::device_wait && launches_block()) {
    throw Error(Status::unsupported,
                "a device that waits for the host, with CUDA_LAUNCH_BLOCKING set: the launch would "
                "wait for its own end; allowed is Signal::host_launch");
  }
  chosen = signal_;
}

ResidentPlace CudaStepper::place() const {
  return {config_.ordinal, memory_.session(), shape_,
          RowWaits{exchange_->failure_line(), store_->scratch<WaitSums>(store_->layout().waited()),
                   exchange_->timeout_ns()}};
}

StepParams CudaStepper::step_params(uint32_t layer, StepQueue queue) const {
  const ResidentStore& store = *store_;
  const ScratchLayout& at = store.layout();
  StepParams p;
  store.set_ring(layer, p);
  exchange_->set_publishing(layer, p);
  p.arrivals = store.scratch<uint32_t>(at.arrivals(queue));
  p.ready = store.scratch<uint32_t>(at.ready());
  p.host_states = store.scratch<float>(at.host_states());
  p.numbers = store.scratch<uint32_t>(at.numbers(layer));
  p.partial_o = store.scratch<float>(at.partial_o(queue));
  p.partial_states = store.scratch<AttentionState>(at.partial_states(queue));
  p.resident_o = store.scratch<float>(at.resident_o(layer));
  p.resident_lse = store.scratch<float>(at.resident_lse(layer));
  return p;
}

// --- steps with tensors of the host ------------------------------------------------------------------

void CudaStepper::attend_begin(uint32_t layer, const float* q, Codes* codes) {
  store_->wait_idle(layer);
  const DeviceScope device(config_.ordinal);
  const BesideCapture beside;
  const cudaStream_t own = store_->own_stream();
  // By a copy, not read from the host by the kernel: its hundreds of blocks would each fetch q over the bus.
  std::memcpy(exchange_->host_q(), q, exchange_->q_bytes());
  auto* device_q = store_->scratch<float>(store_->layout().host_q());
  check(cudaMemcpyAsync(device_q, exchange_->host_q(), exchange_->q_bytes(), cudaMemcpyHostToDevice,
                        own),
        "copying q to the device");

  StepParams p = step_params(layer, StepQueue::host);
  const auto heads_of = [&](float* data) {
    return dense_tensor(reinterpret_cast<std::byte*>(data), 1, shape_.q_heads, shape_.head_dim,
                        DType::f32, Memory::device);
  };
  p.q = heads_of(device_q);
  p.counts = false;
  exchange_->set_result(++ticket_, p);
  host_step_has_codes_ = codes != nullptr;
  if (codes != nullptr) {
    // Their state, with the resident one in it, goes where that one would have gone.
    CudaCodes& own_codes = cuda_codes(*codes);
    CodesStep s = own_codes.describe(layer, p.q);
    s.has_resident = true;
    s.resident = p;
    s.out = heads_of(p.resident_o);
    s.lse = p.resident_lse;
    enqueue_codes(s, own_codes.launches_ahead(), own);
  } else {
    launcher_->launch(p, own);
  }
  store_->note_own_work();
}

void CudaStepper::attend_end(StateView out) {
  const DeviceScope device(config_.ordinal);
  const BesideCapture beside;
  const cudaStream_t own = store_->own_stream();
  uint32_t head = 0;
  const auto ready = [&] {
    if (host_step_has_codes_) return cudaStreamQuery(own) == cudaSuccess;
    return exchange_->has_result(ticket_, head);
  };
  // A kernel that failed raises no flag: look at the stream now and then.
  constexpr uint64_t kSpinUs = 2000;
  cudaError_t error = cudaSuccess;
  const auto failed = [&] {
    error = cudaStreamQuery(own);
    if (error == cudaErrorNotReady) error = cudaSuccess;
    return error != cudaSuccess;
  };
  if (!wait_until(ready, kSpinUs, uint64_t{config_.timeout_ms} * 1000, failed)) {
    check(error, "the resident attention");
    throw Error(Status::timeout, "the resident attention has not ended within " +
                                     std::to_string(config_.timeout_ms) + " ms");
  }
  exchange_->read_result(out);
}

// --- what went on ------------------------------------------------------------------------------------

Status CudaStepper::failure(std::string& text) {
  if (const Status noted = exchange_->failure(text); noted != Status::ok) return noted;
  const DeviceScope device(config_.ordinal);
  const BesideCapture beside;
  const cudaError_t error = cudaStreamQuery(store_->own_stream());
  if (error == cudaSuccess || error == cudaErrorNotReady) return Status::ok;
  text = std::string("CUDA says '") + cudaGetErrorString(error) + "' (" + cudaGetErrorName(error) +
         ")";
  return Status::device_error;
}

uint64_t CudaStepper::most_of(uint64_t WaitSums::*sum) const {
  std::vector<WaitSums> sums(shape_.kv_heads);
  store_->read_back(store_->layout().waited(), sums.data(), sums.size() * sizeof(WaitSums));
  uint64_t most = 0;
  for (const WaitSums& head : sums) most = std::max(most, head.*sum);
  return most;
}

uint64_t CudaStepper::wait_nanoseconds() const { return most_of(&WaitSums::nanoseconds); }
uint64_t CudaStepper::merges() const { return most_of(&WaitSums::merges); }

}  // namespace keyhole::gpu

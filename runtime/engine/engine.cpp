#include "runtime/engine/engine.h"

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <string_view>

#include "gpu/mixed_device.h"
#include "runtime/engine/device_choice.h"
#include "runtime/engine/gpu_accelerator.h"
#include "runtime/engine/host_device.h"

namespace keyhole::runtime {
namespace {

constexpr uint32_t kDefaultTimeoutMs = 10000;

// Of a text that is spread over ranks. Long enough that a turn of a chat lies on one rank, short enough that a prompt
// of some ten thousand tokens is shared by all.
constexpr uint32_t kDefaultBlockTokens = 4096;
constexpr uint32_t kMostBlockTokens = uint32_t{1} << 30;

/// The config's wish, else the environment's, else none: then devices are tried.
keyhole_signal choose_signal(keyhole_signal signal) {
  if (signal != KEYHOLE_SIGNAL_AUTO && signal != KEYHOLE_SIGNAL_WAIT &&
      signal != KEYHOLE_SIGNAL_LAUNCH) {
    throw Error(Status::invalid_argument,
                "signal is " + std::to_string(signal) +
                    ", allowed: KEYHOLE_SIGNAL_AUTO (0), KEYHOLE_SIGNAL_WAIT (1), "
                    "KEYHOLE_SIGNAL_LAUNCH (2)");
  }
  const char* text = std::getenv("KEYHOLE_SIGNAL");
  if (signal != KEYHOLE_SIGNAL_AUTO || text == nullptr || *text == 0) return signal;
  if (std::string_view(text) == "wait") return KEYHOLE_SIGNAL_WAIT;
  if (std::string_view(text) == "launch") return KEYHOLE_SIGNAL_LAUNCH;
  throw Error(Status::invalid_argument, std::string("environment variable KEYHOLE_SIGNAL is \"") +
                                            text + "\", allowed: wait, launch");
}

gpu::CudaConfig cuda_config(uint32_t ordinal, keyhole_signal signal, uint32_t timeout_ms) {
  gpu::CudaConfig config;
  config.ordinal = static_cast<int>(ordinal);
  config.probe_signal = signal == KEYHOLE_SIGNAL_AUTO;
  config.signal =
      signal == KEYHOLE_SIGNAL_LAUNCH ? gpu::Signal::host_launch : gpu::Signal::device_wait;
  config.timeout_ms = timeout_ms;
  return config;
}

}  // namespace

void check_threads(uint32_t threads) {
  if (threads <= cpu::Pool::kMaxThreads) return;
  throw Error(Status::invalid_argument, "threads is " + std::to_string(threads) +
                                            ", allowed: 0 (one per core).." +
                                            std::to_string(cpu::Pool::kMaxThreads));
}

Engine::Engine(const keyhole_engine_config& config, std::shared_ptr<const gpu::Device> device)
    : layer_configs_(read_layers(config)),
      model_(check_model(config)),
      ropes_(check_ropes(config)),
      log_{config.log, config.log_user},
      device_(std::move(device)) {
  check_threads(config.threads);
  if (config.run != nullptr && config.pin_threads != 0) {
    throw Error(Status::invalid_argument,
                "pin_threads is " + std::to_string(config.pin_threads) +
                    ", allowed: 0 where `run` gives the caller's threads, which are not moved");
  }
  join_ranks(config);
  kernels_ = &cpu::select_kernels(config.cpu_level);
  const keyhole_signal signal = choose_signal(config.signal);
  const uint32_t timeout_ms =
      config.timeout_ms == KEYHOLE_AUTO ? default_timeout_ms() : config.timeout_ms;
  std::string why_host;
  if (!has_streams()) {
    const std::vector<gpu::DeviceInfo> gpus = gpu::cuda_devices();
    const uint32_t ordinal = config.device_ordinal;
    DeviceChoice choice = choose_device(config.device, ordinal, gpus, gpu::cuda_status(),
                                        unsupported_on_device(model_));
    why_host = std::move(choice.reason);
    if (choice.cuda) {
      device_ = gpu::make_cuda_device(cuda_config(config.device_ordinal, signal, timeout_ms));
      model_.device_limits = gpu::kernel_limits(static_cast<int>(ordinal));
    }
  }
  if (model_.layers_differ() && has_streams()) {
    device_ = gpu::for_mixed_layers(std::move(device_));
  }
  if (device_has(gpu::DevicePart::builds)) {
    accelerator_ =
        std::make_unique<BuildAccelerator>(std::make_unique<GpuAccelerator>(device_, log_));
  }
  log_(KEYHOLE_LOG_INFO, std::string("device: ") + device_name() +
                             (why_host.empty() ? std::string() : " (" + why_host + ")"));
  if (config.classifiers != nullptr) {
    classifiers_path_ = config.classifiers;
    classifiers_ = Classifiers(classifiers_path_, model_, ropes_, *kernels_);
    log_(KEYHOLE_LOG_INFO, "classifiers: " + std::to_string(classifiers_.count()) + " of " +
                               std::to_string(model_.head_numbers().count()) + " heads, from " +
                               classifiers_path_);
  }

  cpu::PoolConfig pool;
  pool.threads = config.threads;
  // A worker that shares its core delays the step for a time slice: steps of 16 threads on 16 cores took four times
  // as long as those of 14, beside the caller's thread, which launches kernels meanwhile, and the driver's.
  pool.spare = has_streams() ? 2 : 0;
  pool.pin = config.pin_threads != 0;
  if (config.spin_us != KEYHOLE_AUTO) pool.spin_us = config.spin_us;
  pool.run = config.run;
  pool.run_user = config.run_user;
  pool_ = std::make_unique<cpu::Pool>(pool);

  effective_ = config;
  effective_.scale = model_.logits.scale;
  complete_rope(effective_);
  effective_.value_dim = config.value_dim == KEYHOLE_AUTO ? config.head_dim : config.value_dim;
  effective_.context_block = communicator_ == nullptr ? 0 : text_blocks_.block;
  effective_.sink_logits = model_.sinks.empty() ? nullptr : model_.sinks.data();
  effective_.layer_configs = layer_configs_.empty() ? nullptr : layer_configs_.data();
  effective_.device = has_streams() ? KEYHOLE_DEVICE_CUDA : KEYHOLE_DEVICE_HOST;
  effective_.signal = signal;
  effective_.timeout_ms = timeout_ms;
  effective_.threads = pool_->threads();
  effective_.spin_us = pool.spin_us;
  effective_.cpu_level = kernels_->name;
  if (config.classifiers != nullptr) effective_.classifiers = classifiers_path_.c_str();
  log_(KEYHOLE_LOG_INFO, std::string("kernels: ") + kernels_->name +
                             ", threads: " + std::to_string(pool_->threads()) +
                             (config.run != nullptr ? " at most, the caller's" : ""));
}

uint32_t Engine::default_timeout_ms() const {
  if (communicator_ == nullptr) return kDefaultTimeoutMs;
  // A step stands behind gathers, which wait for the other ranks: these are given up first.
  const uint64_t ms = uint64_t{communicator_->config().timeout_ms} + kDefaultTimeoutMs;
  return static_cast<uint32_t>(std::min<uint64_t>(ms, UINT32_MAX - 1));
}

void Engine::join_ranks(const keyhole_engine_config& config) {
  if (config.communicator == nullptr) return;
  if (config.context_block > kMostBlockTokens) {
    throw Error(Status::invalid_argument,
                "context_block is " + std::to_string(config.context_block) + ", allowed: 0 (" +
                    std::to_string(kDefaultBlockTokens) + ").." + std::to_string(kMostBlockTokens));
  }
  communicator_ = config.communicator->communicator;
  text_blocks_ = {config.context_block == KEYHOLE_AUTO ? kDefaultBlockTokens : config.context_block,
                  communicator_->size()};
  if (model_.sinks.empty() || communicator_->rank() == 0) return;
  // Learned sinks count once: on rank 0. Sliding layers are whole on every rank.
  for (uint32_t layer = 0; layer < model_.layers; ++layer) {
    if (model_.slides(layer)) continue;
    std::fill_n(model_.sinks.begin() + static_cast<ptrdiff_t>(model_.first_q_head(layer)),
                model_.of(layer).q_heads, kMinusInf);
  }
}

namespace {

/// Of `total` bytes, resident tokens and codes together: within the limit, or half where there is none.
uint64_t beside_resident(uint64_t total, uint64_t resident, size_t limit) {
  const uint64_t most = limit == 0 ? total / 2 : std::min<uint64_t>(total, limit);
  return most > resident ? most - resident : 0;
}

}  // namespace

CodeRoom Engine::code_room(size_t device_memory_limit) const {
  if (!device_has(gpu::DevicePart::codes)) return nullptr;
  return [this, device_memory_limit](const gpu::ResidentShape& shape) -> uint64_t {
    const std::optional<size_t> free = device_->free_bytes();
    if (!free && device_memory_limit == 0) return UINT64_MAX;
    return beside_resident(free ? *free : UINT64_MAX, gpu::cuda_resident_bytes(shape),
                           device_memory_limit);
  };
}

uint64_t Engine::code_room_of(const gpu::ResidentShape& shape, size_t device_memory_limit,
                              size_t held, const OtherBytes& others) const {
  const std::optional<size_t> free = device_->free_bytes();
  if (!free && device_memory_limit == 0) return UINT64_MAX;
  const uint64_t taken = gpu::cuda_resident_bytes(shape) + others.taken;
  const uint64_t total = free ? *free + held + taken : UINT64_MAX;
  return beside_resident(total, taken + others.to_come, device_memory_limit);
}

std::unique_ptr<gpu::Resident> Engine::make_resident(const gpu::ResidentShape& shape,
                                                     size_t device_memory_limit) const {
  if (!has_streams()) return std::make_unique<HostDevice>(shape, *kernels_, model_.shapes);
  auto session = std::make_shared<gpu::SessionOnDevice>();
  session->memory_limit = device_memory_limit;
  return device_->make_resident(shape, session);
}

}  // namespace keyhole::runtime

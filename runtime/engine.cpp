#include "runtime/engine.h"

#include "runtime/host_device.h"

namespace keyhole::runtime {
namespace {

constexpr uint32_t kMaxThreads = 4096;

void check_device(keyhole_device device, const Log& log) {
  switch (device) {
    case KEYHOLE_DEVICE_AUTO:
    case KEYHOLE_DEVICE_HOST: {
      const auto gpus = gpu::cuda_devices();
      std::string why;
      if (device == KEYHOLE_DEVICE_AUTO) {
        why = gpus.empty() ? gpu::cuda_status()
                           : gpus.front().name + " is there, but this version attends on the host";
      } else {
        why = "as asked";
      }
      log(KEYHOLE_LOG_INFO, "device: host (" + why + ")");
      return;
    }
    case KEYHOLE_DEVICE_CUDA:
      throw Error(
          Status::unsupported,
          "device KEYHOLE_DEVICE_CUDA is not available: this version attends on the host (" +
              gpu::cuda_status() + "); allowed: KEYHOLE_DEVICE_AUTO, KEYHOLE_DEVICE_HOST");
    default:
      throw Error(Status::invalid_argument,
                  "device is " + std::to_string(device) +
                      ", allowed: KEYHOLE_DEVICE_AUTO (0), KEYHOLE_DEVICE_HOST (1), "
                      "KEYHOLE_DEVICE_CUDA (2)");
  }
}

}  // namespace

Engine::Engine(const keyhole_engine_config& config)
    : model_(check_model(config)), rope_(check_rope(config)), log_{config.log, config.log_user} {
  if (config.threads > kMaxThreads) {
    throw Error(Status::invalid_argument, "threads is " + std::to_string(config.threads) +
                                              ", allowed: 0 (one per core).." +
                                              std::to_string(kMaxThreads));
  }
  kernels_ = &cpu::select_kernels(config.cpu_level);
  check_device(config.device, log_);
  if (config.classifiers != nullptr) {
    classifiers_path_ = config.classifiers;
    classifiers_ = Classifiers(classifiers_path_, model_, rope_, *kernels_);
    log_(KEYHOLE_LOG_INFO, "classifiers: " + std::to_string(classifiers_.count()) + " of " +
                               std::to_string(size_t{model_.layers} * model_.kv_heads) +
                               " heads, from " + classifiers_path_);
  }

  cpu::PoolConfig pool;
  pool.threads = config.threads;
  pool.pin = config.pin_threads != 0;
  if (config.spin_us != KEYHOLE_AUTO) pool.spin_us = config.spin_us;
  pool_ = std::make_unique<cpu::Pool>(pool);

  effective_ = config;
  effective_.scale = model_.logits.scale;
  effective_.device = KEYHOLE_DEVICE_HOST;
  effective_.threads = pool_->threads();
  effective_.spin_us = pool.spin_us;
  effective_.cpu_level = kernels_->name;
  if (config.classifiers != nullptr) effective_.classifiers = classifiers_path_.c_str();
  log_(KEYHOLE_LOG_INFO, std::string("kernels: ") + kernels_->name +
                             ", threads: " + std::to_string(pool_->threads()));
}

std::unique_ptr<gpu::Resident> Engine::make_resident(const gpu::ResidentShape& shape) const {
  return std::make_unique<HostDevice>(shape, *kernels_);
}

}  // namespace keyhole::runtime

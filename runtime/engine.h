// The engine: model shape, device, worker pool, kernels. Immutable, shared by its sessions.
#pragma once

#include <memory>
#include <string>

#include "cpu/kernels.h"
#include "cpu/pool.h"
#include "gpu/device.h"
#include "index/index.h"
#include "runtime/classifier_file.h"
#include "runtime/config.h"
#include "runtime/log.h"

namespace keyhole::runtime {

class Engine {
 public:
  /// Throws Error for fields that are not allowed, and Error(unsupported) for a device or CPU level that
  /// this build or machine does not have.
  explicit Engine(const keyhole_engine_config& config);

  [[nodiscard]] const ModelShape& model() const { return model_; }
  [[nodiscard]] const index::RopeParams& rope() const { return rope_; }
  [[nodiscard]] const cpu::Kernels& kernels() const { return *kernels_; }
  [[nodiscard]] cpu::Pool& pool() const { return *pool_; }
  [[nodiscard]] const Log& log() const { return log_; }
  [[nodiscard]] const keyhole_engine_config& effective_config() const { return effective_; }
  [[nodiscard]] const char* device_name() const { return "host"; }
  /// What an index of this layer and KV head works with.
  [[nodiscard]] index::Context index_context(uint32_t layer, uint32_t kv_head) const {
    return {kernels_, pool_.get(), classifiers_.of(layer, kv_head), model_.logits};
  }

  /// Resident K and V for a new session, on the engine's device.
  [[nodiscard]] std::unique_ptr<gpu::Resident> make_resident(const gpu::ResidentShape& shape) const;

 private:
  ModelShape model_;
  index::RopeParams rope_;
  Log log_;
  const cpu::Kernels* kernels_ = nullptr;
  std::unique_ptr<cpu::Pool> pool_;
  std::string classifiers_path_;
  Classifiers classifiers_;
  keyhole_engine_config effective_{};
};

}  // namespace keyhole::runtime

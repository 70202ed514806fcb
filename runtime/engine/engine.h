// The engine: model shape, device, worker pool, kernels. Immutable, shared by its sessions.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/pool.h"
#include "gpu/device.h"
#include "index/accelerator.h"
#include "index/index.h"
#include "runtime/engine/build_accelerator.h"
#include "runtime/engine/classifier_file.h"
#include "runtime/engine/log.h"
#include "runtime/plan/config.h"
#include "runtime/ranks/blocks.h"
#include "runtime/ranks/communicator.h"

namespace keyhole::runtime {

/// Throws Error(invalid_argument) where an engine cannot have so many; 0: one per core.
void check_threads(uint32_t threads);

class Engine {
 public:
  /// Throws Error for fields that are not allowed, and Error(unsupported) for a device or CPU level that
  /// this build or machine does not have. `device`: in place of the one that the config asks for; null: that one.
  explicit Engine(const keyhole_engine_config& config,
                  std::shared_ptr<const gpu::Device> device = nullptr);

  [[nodiscard]] const ModelShape& model() const { return model_; }
  /// Of a layer.
  [[nodiscard]] const index::RopeParams& rope(uint32_t layer) const {
    return ropes_.size() == 1 ? ropes_.front() : ropes_[layer];
  }
  [[nodiscard]] const cpu::Kernels& kernels() const { return *kernels_; }
  [[nodiscard]] cpu::Pool& pool() const { return *pool_; }
  [[nodiscard]] const Log& log() const { return log_; }
  [[nodiscard]] const keyhole_engine_config& effective_config() const { return effective_; }
  [[nodiscard]] const char* device_name() const {
    return has_streams() ? device_->name().c_str() : "host";
  }
  /// Whether sessions take tensors in device memory, and steps in the order of a stream.
  [[nodiscard]] bool has_streams() const { return device_ != nullptr; }
  /// The device whose streams these are: there is one.
  [[nodiscard]] const gpu::Device& stream_device() const { return *device_; }
  /// Whether there is a device with streams, and it has this part.
  [[nodiscard]] bool device_has(gpu::DevicePart part) const {
    return has_streams() && device_->has(part);
  }
  /// What an index of this layer and KV head works with.
  [[nodiscard]] index::Context index_context(uint32_t layer, uint32_t kv_head) const {
    return {kernels_, pool_.get(), classifiers_.of(layer, kv_head), model_.logits_of(layer),
            accelerator_.get()};
  }
  /// Memory that codes of a new session may take beside its resident tokens: within the limit and what is free, or half
  /// of what is free; UINT64_MAX: no limit, and not known. Null: the device has no codes.
  [[nodiscard]] CodeRoom code_room(size_t device_memory_limit) const;
  /// Of a session, for other things than resident tokens and codes.
  struct OtherBytes {
    uint64_t taken = 0, to_come = 0;
  };
  /// The same of a session that is there, with its resident tokens and `held` bytes of codes, which make way for
  /// others.
  [[nodiscard]] uint64_t code_room_of(const gpu::ResidentShape& shape, size_t device_memory_limit,
                                      size_t held, const OtherBytes& others) const;
  /// The ranks that sessions are spread over; null: none.
  [[nodiscard]] const std::shared_ptr<Communicator>& communicator() const { return communicator_; }
  /// Which of a text's tokens is whose: without ranks all are this one's.
  [[nodiscard]] const TextBlocks& text_blocks() const { return text_blocks_; }
  /// What helps to build indexes; null: nothing.
  [[nodiscard]] BuildAccelerator* accelerator() const { return accelerator_.get(); }

  /// Resident K and V for a new session, on the engine's device, within device_memory_limit bytes of it (0: what
  /// there is; a CUDA device only).
  [[nodiscard]] std::unique_ptr<gpu::Resident> make_resident(const gpu::ResidentShape& shape,
                                                             size_t device_memory_limit) const;

 private:
  /// Milliseconds that device and host wait for each other.
  [[nodiscard]] uint32_t default_timeout_ms() const;
  void join_ranks(const keyhole_engine_config& config);

  std::vector<keyhole_layer_config> layer_configs_;  ///< `[layers]` in effect; empty: all are alike
  ModelShape model_;
  std::vector<index::RopeParams> ropes_;  ///< one, or `[layers]`
  Log log_;
  const cpu::Kernels* kernels_ = nullptr;
  std::unique_ptr<cpu::Pool> pool_;
  std::string classifiers_path_;
  Classifiers classifiers_;
  keyhole_engine_config effective_{};
  std::shared_ptr<const gpu::Device> device_;  ///< null: the host
  std::unique_ptr<BuildAccelerator> accelerator_;
  std::shared_ptr<Communicator> communicator_;
  TextBlocks text_blocks_{UINT32_MAX, 1};
};

/// The length of a build that a call asked for: only then the accelerator helps. Blocks that are indexed beside the
/// decoding never use it, as its allocations and copies would break a capture that the caller has under way in another
/// thread. At the end of the last such build it gives its memory back.
class AcceleratedBuild {
 public:
  explicit AcceleratedBuild(const Engine& engine) : accelerator_(engine.accelerator()) {
    if (accelerator_ != nullptr) accelerator_->open();
  }
  ~AcceleratedBuild() {
    if (accelerator_ != nullptr) accelerator_->close();
  }
  AcceleratedBuild(const AcceleratedBuild&) = delete;
  AcceleratedBuild& operator=(const AcceleratedBuild&) = delete;

 private:
  BuildAccelerator* accelerator_;
};

}  // namespace keyhole::runtime

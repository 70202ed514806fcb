// A Partitions in the memory of a CUDA device: what a Resident of the same session enqueues and reads of it.
#pragma once

#include <atomic>
#include <memory>

#include "gpu/partitions.h"
#include "gpu/step.h"

namespace keyhole::gpu {

class CudaPartitions final : public Partitions {
 public:
  /// In the memory of device `ordinal`. may_cluster false: as on a GPU whose blocks form no clusters. Throws Error:
  /// invalid_argument, out_of_device_memory, device_error.
  explicit CudaPartitions(const PartitionsShape& shape, int ordinal = 0, bool may_cluster = true);
  ~CudaPartitions() override;

  void upload(uint32_t layer, uint32_t kv_head, uint32_t first, const PartitionRows& rows) override;
  [[nodiscard]] uint32_t count(uint32_t layer, uint32_t kv_head) const override;
  void set(uint32_t layer, uint32_t kv_head, uint32_t chosen, PartitionsTail tail) override;
  [[nodiscard]] size_t bytes() const override;

  /// Enqueues: score all partitions of the layer, choose for each KV head, publish the numbers. The step's sequence
  /// number is *sequence + 1 when the kernel runs (device memory, one counter per layer; its owner advances it later in
  /// the step).
  void choose(uint32_t layer, const DeviceRows& q, const uint32_t* sequence, Stream stream);
  /// Enqueues, after choose(): the state of the partitions that were not chosen, to tail_o() and tail_lse().
  void attend(uint32_t layer, Stream stream);
  [[nodiscard]] const float* tail_o() const;    ///< `[q_heads, head_dim]`, device memory
  [[nodiscard]] const float* tail_lse() const;  ///< `[q_heads]`, device memory

  /// Host side of choose(), as StreamSteps::chosen().
  [[nodiscard]] bool await(uint32_t layer, uint32_t kv_head, uint32_t sequence, uint64_t timeout_us,
                           const std::atomic<bool>& stop, Chosen& out);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace keyhole::gpu

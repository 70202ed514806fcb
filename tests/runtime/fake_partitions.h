// Partitions on the device of tests/runtime/stream_device.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/types.h"
#include "gpu/partitions.h"

namespace keyhole::test {

/// Partitions that are chosen by their share of the weight of means, and stand for their keys by it.
class FakePartitions final : public gpu::Partitions {
 public:
  explicit FakePartitions(const gpu::PartitionsShape& shape)
      : shape_(shape), heads_(size_t{shape.layers} * shape.kv_heads) {}

  void upload(uint32_t layer, uint32_t kv_head, uint32_t first,
              const gpu::PartitionRows& rows) override;
  uint32_t count(uint32_t layer, uint32_t kv_head) const override;
  void set(uint32_t layer, uint32_t kv_head, uint32_t chosen, gpu::PartitionsTail tail) override;
  size_t bytes() const override { return gpu::partitions_bytes(shape_); }

  std::function<void()> on_call = [] {};  ///< before a copy to the device: may throw

  /// The ids chosen, and the state of the others.
  std::vector<uint32_t> run(uint32_t layer, uint32_t kv_head, const float* q, uint32_t group,
                            const cpu::Kernels& kernels, StateView tail);

 private:
  struct Head {
    std::vector<float> keys, sizes;
    std::vector<std::byte> values;
    uint32_t chosen = 0;
    gpu::PartitionsTail tail = gpu::PartitionsTail::none;
  };
  Head& head(uint32_t layer, uint32_t kv_head);
  gpu::PartitionsShape shape_;
  std::vector<Head> heads_;
};

}  // namespace keyhole::test

// Partitions of the offloaded tokens on the device. The mean key and mean value of a partition are a pseudo-token that
// weighs as much as its keys together. A step scores all partitions of a layer, chooses the best ones of each KV head,
// sends their numbers to the host, which reads those whole, and attends the others' pseudo-tokens in place of their
// keys (RetroInfer's estimation zone; index/tail has the formulas).
//
// 128k keys at 16 keys per partition are 8192 pseudo-tokens a head: int8 mean keys, mean values in K and V's
// dtype, two numbers: 392 bytes each at d = 128, 0.8 GB for 256 heads.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "cpu/layer_shape.h"
#include "cpu/types.h"

namespace keyhole::gpu {

struct PartitionsShape {
  uint32_t layers = 0;
  uint32_t q_heads = 0;
  uint32_t kv_heads = 0;
  uint32_t head_dim = 0;
  DType dtype = DType::f16;  ///< of mean values
  uint32_t partitions = 0;   ///< capacity of a (layer, KV head)
  uint32_t most_chosen = 0;  ///< so many can be chosen for a KV head, at most 1024
  LogitParams logits;
  std::vector<LogitParams> layer_logits{};  ///< `[layers]`; empty: `logits` of all
  std::vector<LayerShape> shapes{};         ///< as ResidentShape::shapes

  [[nodiscard]] const LogitParams& logits_of(uint32_t layer) const {
    return logits_of_layer(logits, layer_logits, layer);
  }
};

/// Partitions of one KV head, in host memory.
struct PartitionRows {
  uint32_t count = 0;
  const int8_t* keys = nullptr;   ///< `[count, head_dim]` codes of the mean keys
  const float* scales = nullptr;  ///< `[head_dim]` mean key element = center + scale * code
  const float* center = nullptr;  ///< `[head_dim]`
  const float* sizes = nullptr;   ///< `[count]` keys in it, >= 1
  /// `[head_dim]` what the elements of a query are multiplied by before |q|^2 is taken, for all partitions of the head
  /// alike: 1 / s where variances are those of keys times s. null: 1.
  const float* query_scales = nullptr;
  const float* variances =
      nullptr;  ///< `[count]` mean over the elements of the (scaled) keys' variance
  const std::byte* values = nullptr;  ///< `[count, head_dim]` mean values of PartitionsShape::dtype
};

enum class PartitionsTail : uint8_t {
  none,      ///< what is not chosen weighs nothing
  centroid,  ///< n * e^(logit of the mean key)
  second  ///< with e^(t/2), t = (slope of the logit)^2 * |q, scaled|^2 * variance, as index/tail/tail_estimate.h
};

/// Partitions of all heads of a session. One thread at a time, no step under way, but for what StreamSteps does.
class Partitions {
 public:
  virtual ~Partitions() = default;

  /// Replaces partitions [first, first + rows.count) of a head; it has first + rows.count of them then. Throws
  /// Error(invalid_argument) beyond PartitionsShape::partitions.
  virtual void upload(uint32_t layer, uint32_t kv_head, uint32_t first,
                      const PartitionRows& rows) = 0;
  [[nodiscard]] virtual uint32_t count(uint32_t layer, uint32_t kv_head) const = 0;
  /// How many are chosen per step (0..most_chosen), and what stands for the others.
  virtual void set(uint32_t layer, uint32_t kv_head, uint32_t chosen, PartitionsTail tail) = 0;
  [[nodiscard]] virtual size_t bytes() const = 0;
};

/// Bytes of device memory that a Partitions of this shape takes.
[[nodiscard]] size_t partitions_bytes(const PartitionsShape& shape);

}  // namespace keyhole::gpu

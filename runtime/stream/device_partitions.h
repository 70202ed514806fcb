// The partitions of tails on the device (gpu/partitions.h): which heads have theirs there, and keeping them as the
// trees on the host are.
//
// A head's partitions are uploaded where its budget lets the device choose among them. What a graph holds of them is
// whether a layer's are scored at all, and where they lie: version() counts the changes of that. How many are chosen
// and what stands for the others lies in device memory, and may change under a graph.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "gpu/partitions.h"
#include "index/tail/tail_tree.h"
#include "runtime/engine/log.h"
#include "runtime/plan/config.h"

namespace keyhole::runtime {

/// One KV head, as far as its partitions go.
struct PartitionedHead {
  const index::TailTree* tree =
      nullptr;            ///< null: the head's budget does not let the device choose
  uint32_t min_keys = 0;  ///< so many keys' worth of partitions are chosen
  keyhole_tail_mode tail = KEYHOLE_TAIL_CENTROID;
};

/// From one thread at a time, and not while a step is under way; but for layer_has() and holds(), which the step's
/// thread calls.
class DevicePartitions {
 public:
  using Make = std::function<std::unique_ptr<gpu::Partitions>(const gpu::PartitionsShape&)>;

  /// The session's params stay valid, and may change. Nothing is made before a head wants it.
  DevicePartitions(const SessionParams& params, const ModelShape& model, Make make, const Log& log);

  /// Heads, budgets or trees have changed: update() is needed before the next step.
  void set_stale() { is_stale_ = true; }
  [[nodiscard]] bool is_stale() const { return is_stale_; }
  /// What was uploaded is not a part of the trees any more.
  void drop();
  /// Partitions for which the device had no memory are tried again, with the next update().
  void retry() { is_refused_ = false; }

  /// Brings the device up to `heads` (`[layers, kv_heads]`). Returns the rows that the largest choice of a head can
  /// have, for DecodeStep::reserve_rows(). Throws Error(out_of_device_memory | device_error), stays stale then; where
  /// the placement is AUTO, partitions that cannot be made stay on the host, and the log says so.
  size_t update(std::span<const PartitionedHead> heads);

  /// Whether steps of a layer score partitions on the device.
  [[nodiscard]] bool layer_has(uint32_t layer) const { return layers_[layer]; }
  /// Those of a layer that has some; null for others.
  [[nodiscard]] gpu::Partitions* of_layer(uint32_t layer) const {
    return layers_[layer] ? partitions_.get() : nullptr;
  }
  /// Whether the device holds all partitions of a head's tree and chooses among them.
  [[nodiscard]] bool holds(uint32_t layer, uint32_t kv_head, const index::TailTree& tree) const {
    const size_t i = numbers_.at(layer, kv_head);
    return chooses_[i] && counts_[i] == tree.fine().count();
  }

  /// Changes with all that a captured graph has in it.
  [[nodiscard]] uint64_t version() const { return version_; }
  /// Of device memory, now and at most so far.
  [[nodiscard]] size_t bytes() const { return partitions_ == nullptr ? 0 : partitions_->bytes(); }
  [[nodiscard]] size_t bytes_peak() const { return bytes_peak_; }

 private:
  [[nodiscard]] bool may_choose(size_t i, const PartitionedHead& head);
  [[nodiscard]] bool reserve(uint32_t partitions);
  size_t upload(size_t i, const PartitionedHead& head);

  const SessionParams* params_;
  ModelShape model_;
  Make make_;
  Log log_;
  std::unique_ptr<gpu::Partitions> partitions_;  ///< null: none
  uint32_t capacity_ = 0;                        ///< partitions of a head
  HeadNumbers numbers_;
  std::vector<uint32_t> counts_;  ///< [head, by its number] uploaded
  std::vector<char> chooses_;     ///< likewise: the device chooses among them
  std::vector<char> layers_;      ///< [layer] it chooses for some head
  bool is_refused_ = false;       ///< the device had no memory for them
  bool is_stale_ = true;
  bool has_told_of_many_ = false;
  uint64_t version_ = 1;
  size_t bytes_peak_ = 0;
};

}  // namespace keyhole::runtime

// The device where there is no GPU: sink and window in host memory, attended by the worker pool.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/layer_shape.h"
#include "cpu/memory.h"
#include "gpu/device.h"

namespace keyhole::runtime {

/// K and V of a (layer, KV head) lie together, `[slots, head_dim]`: the sink's S slots, then the window,
/// oldest first. The window is no ring: a flush moves what stays to the front (W rows once per flush
/// block), so that a step attends one contiguous range, and its bits depend on the tokens alone.
class HostDevice final : public gpu::Resident {
 public:
  /// layers: `[layers]` or more, in place of the shape's heads; empty: those are of all layers.
  HostDevice(const gpu::ResidentShape& shape, const cpu::Kernels& kernels,
             std::span<const LayerShape> layers = {});

  void append_sink(uint32_t layer, const std::byte* k, const std::byte* v, uint32_t n) override;
  void append_window(uint32_t layer, const std::byte* k, const std::byte* v, uint32_t n) override;
  void evict(uint32_t layer, std::byte* k, std::byte* v, uint32_t n) override;
  void truncate(uint32_t layer, uint32_t sink, uint32_t window) override;
  [[nodiscard]] uint32_t sink_count(uint32_t layer) const override { return layers_[layer].sink; }
  [[nodiscard]] uint32_t window_count(uint32_t layer) const override {
    return layers_[layer].window;
  }
  using Resident::attend_begin;
  void attend_begin(uint32_t layer, const float* q, gpu::Codes* codes) override;
  [[nodiscard]] uint32_t host_tasks() const override { return layers_[step_layer_].shape.kv_heads; }
  void run_host_task(uint32_t task) override;
  [[nodiscard]] StateView host_state(uint32_t kv_head) override;
  void attend_end(StateView out) override;
  [[nodiscard]] KvView contiguous_rows(uint32_t layer, uint32_t kv_head) const override;
  void read(uint32_t layer, std::byte* k, std::byte* v) const override;
  [[nodiscard]] KvPieces host_rows(uint32_t layer) override;

 private:
  struct Layer {
    uint32_t sink = 0;
    uint32_t window = 0;
    LayerShape shape{};
    size_t row_bytes = 0;
    size_t first_byte = 0;  ///< of memory_
    [[nodiscard]] size_t token_bytes() const { return shape.kv_heads * row_bytes; }
  };

  /// The tokens of all heads.
  [[nodiscard]] KvView all_rows(uint32_t layer) const;
  [[nodiscard]] size_t slots() const { return shape_.sink + shape_.window_capacity; }
  /// The layers, without memory; how much they need.
  [[nodiscard]] size_t lay_out(std::span<const LayerShape> layers);
  /// First slot of a head's K (which = 0) or V (which = 1).
  [[nodiscard]] std::byte* base(uint32_t layer, uint32_t kv_head, uint32_t which) const;
  void write_slot(uint32_t layer, uint32_t slot, const std::byte* k, const std::byte* v);
  void read_slot(uint32_t layer, uint32_t slot, std::byte* k, std::byte* v) const;

  gpu::ResidentShape shape_;
  const cpu::Kernels* kernels_;
  std::vector<Layer> layers_;
  cpu::ReservedBuffer memory_;
  uint32_t step_layer_ = 0;
  const float* step_q_ = nullptr;
  std::vector<float> o_,
      lse_;  ///< `[q_heads, head_dim]`, `[q_heads]` of the step under way; of any layer
};

}  // namespace keyhole::runtime

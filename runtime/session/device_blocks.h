// Attention of many new tokens at once on a device, over all rows (gpu/blocked.h) or lists of blocks of them
// (gpu/listed.h): what was made for each shape of layers, and the offloaded rows that it reads.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "cpu/tensor_view.h"
#include "gpu/blocked.h"
#include "gpu/listed.h"
#include "runtime/engine/engine.h"
#include "runtime/kv/sequence.h"
#include "runtime/session/code_placement.h"

namespace keyhole::runtime {

class DeviceBlocks {
 public:
  /// All that it is given outlives it; of params kv_host counts.
  DeviceBlocks(const Engine& engine, const SessionParams& params, Sequence& sequence,
               const CodePlacement& codes)
      : engine_(&engine), params_(&params), sequence_(&sequence), codes_(&codes) {}
  DeviceBlocks(const DeviceBlocks&) = delete;
  DeviceBlocks& operator=(const DeviceBlocks&) = delete;

  /// Whether the device has attention over all rows for the layer's shape.
  [[nodiscard]] bool has_blocked(uint32_t layer) const;
  /// Whether it has attention over lists of blocks, for so many rows.
  [[nodiscard]] bool has_listed(uint64_t rows) const;
  /// For layers of the layer's shape, made when it is first asked for. Throws Error(out_of_device_memory |
  /// device_error).
  [[nodiscard]] gpu::BlockedAttention& blocked(uint32_t layer);
  [[nodiscard]] gpu::ListedAttention& listed(uint32_t layer);
  /// Gives back the device memory of listed(layer), if there is any.
  void release_listed(uint32_t layer);

  /// The offloaded rows of a layer: those that are pinned, and all behind them.
  [[nodiscard]] std::array<KvView, 2> offloaded_rows(uint32_t layer) const;
  /// Bytes of device memory.
  [[nodiscard]] size_t bytes() const;

 private:
  /// What layers of one shape have.
  struct Parts {
    LayerShape shape;
    std::unique_ptr<gpu::BlockedAttention> blocked{};  ///< null: not used yet
    std::unique_ptr<gpu::ListedAttention> listed{};    ///< null: not used yet
  };
  [[nodiscard]] gpu::BlockedShape shape_of(uint32_t layer) const;
  [[nodiscard]] Parts& parts_of(uint32_t layer);

  const Engine* engine_;
  const SessionParams* params_;
  Sequence* sequence_;
  const CodePlacement* codes_;
  std::vector<Parts> parts_;
};

}  // namespace keyhole::runtime

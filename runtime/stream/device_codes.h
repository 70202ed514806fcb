// Codes of offloaded tokens on the device (gpu/codes.h): which layers have theirs there, and keeping them as the
// sequence grows and shrinks.
//
// The codes of a layer cover all of its offloaded rows, or the layer has none: then the host attends it. Rows come in
// whole blocks (Sequence::row_block()), are pinned where they lie when they come, and are encoded by the device, which
// reads them there, in the order of the session's stream. So a step needs nothing of the host, and a graph of steps
// stays valid while tokens come.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "gpu/codes.h"
#include "gpu/step.h"
#include "index/scan/balance.h"
#include "runtime/engine/log.h"
#include "runtime/engine/pinned_memory.h"
#include "runtime/plan/code_plan.h"

namespace keyhole::runtime {

/// What codes are made of.
class CodeSource {
 public:
  virtual ~CodeSource() = default;
  /// All offloaded rows of a head; they stay where they are.
  [[nodiscard]] virtual KvView rows(uint32_t layer, uint32_t kv_head) const = 0;
  /// Scales of the layer's rows where these are int8, `[blocks, kv_heads, 2, head_dim]` bf16, on a page's first byte and
  /// within whole pages; they stay where they are, too. Else null.
  [[nodiscard]] virtual const uint16_t* scales(uint32_t layer) const = 0;
  /// Offloaded rows come in multiples of it.
  [[nodiscard]] virtual uint32_t row_block() const = 0;
  /// Rows of a head that there can be at most.
  [[nodiscard]] virtual size_t row_capacity() const = 0;
  /// The head's balanced space, learned from its rows where there is none yet.
  [[nodiscard]] virtual const index::Balance& balance(uint32_t layer, uint32_t kv_head) = 0;
  /// Memory of the first `rows` rows of the layer's heads is pinned: it cannot be given back.
  virtual void set_pinned(uint32_t layer, size_t rows) = 0;
};

/// From one thread at a time, and not while a step is under way; but for of_layer().
class DeviceCodes {
 public:
  using Make = std::function<std::unique_ptr<gpu::Codes>(const gpu::CodesShape&)>;
  using MakePin = std::function<std::unique_ptr<PinnedMemory>()>;

  /// All that it is given outlives it; the params may change. Nothing is made before plan().
  DeviceCodes(const SessionParams& params, const ModelShape& model, Make make, MakePin make_pin,
              CodeSource& source, const Log& log);

  /// Takes the memory for the codes of a session with these heads (`[layers, kv_heads]`), all of it, where it does not
  /// have it already. Where the device has no room for them, or no kernel for their shape, the layers stay with the
  /// host, and the log says so; with KEYHOLE_PLACE_DEVICE it throws Error(out_of_device_memory | unsupported).
  void plan(std::span<const HeadParams* const> heads);
  /// plan() tries again what was refused.
  void retry() { is_refused_ = false; }

  /// Whether steps of a layer attend its codes.
  [[nodiscard]] bool layer_has(uint32_t layer) const { return plan_.layers[layer] != 0; }
  /// What a step of the layer attends; null: it has none.
  [[nodiscard]] gpu::Codes* of_layer(uint32_t layer) const {
    return layer_has(layer) ? codes_.get() : nullptr;
  }
  /// Whether all rows of a layer that has codes are encoded.
  [[nodiscard]] bool is_current(uint32_t layer) const;
  /// Pins the rows that have come, and enqueues their encoding. Throws Error(out_of_memory | device_error).
  void update(uint32_t layer, gpu::Stream stream);
  /// The layer is about to keep its first `rows` rows. No work on the stream is under way.
  void truncate(uint32_t layer, size_t rows, gpu::Stream stream);
  /// The host attends all layers from now on, until retry(); the log says `why`. No work on the stream is under way.
  void give_up(const std::string& why);

  /// Changes with all that a captured graph has in it.
  [[nodiscard]] uint64_t version() const { return version_; }
  /// Of device memory, now and at most so far.
  [[nodiscard]] size_t bytes() const { return codes_ == nullptr ? 0 : codes_->bytes(); }
  [[nodiscard]] size_t bytes_peak() const { return bytes_peak_; }
  /// Specs of heads that plan() has parsed so far.
  [[nodiscard]] size_t parsed_specs() const { return specs_.parsed(); }
  [[nodiscard]] size_t pinned_bytes() const { return pin_ == nullptr ? 0 : pin_->bytes(); }

 private:
  /// Rows of all heads of a layer that were pinned together.
  struct Piece {
    size_t begin = 0, end = 0;
  };
  struct Layer {
    std::vector<Piece> pieces;
    bool has_balance = false;
    [[nodiscard]] size_t pinned() const { return pieces.empty() ? 0 : pieces.back().end; }
  };

  void make(const CodePlan& plan);
  void drop();
  void pin(uint32_t layer, size_t rows);
  /// Bytes of an offloaded row.
  [[nodiscard]] size_t row_bytes() const {
    return model_.head_dim * dtype_size(params_->offload_dtype(model_));
  }
  /// Bytes from scales() on, in whole pages, that hold the scales of `rows` rows; 0 where there are none.
  [[nodiscard]] size_t scale_bytes(uint32_t layer, size_t rows) const;
  void set_balance(uint32_t layer);

  const SessionParams* params_;
  ModelShape model_;
  Make make_;
  MakePin make_pin_;
  CodeSource* source_;
  Log log_;
  CodeSpecs specs_;
  CodePlan plan_;
  std::unique_ptr<gpu::Codes> codes_;  ///< null: no layer has any
  std::unique_ptr<PinnedMemory> pin_;  ///< with codes_
  std::vector<Layer> layers_;
  bool is_refused_ = false;  ///< there was no room for `refused_`
  CodePlan refused_;
  uint64_t version_ = 1;
  size_t bytes_peak_ = 0;
};

}  // namespace keyhole::runtime

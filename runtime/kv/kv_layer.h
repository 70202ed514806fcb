// The tokens of one layer of a sequence, as those see them that need not know how the layer attends: a full layer keeps
// all of its tokens (kv/full_layer.h), a sliding layer those of its window (kv/sliding_layer.h).
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "gpu/device.h"
#include "runtime/engine/tensor.h"

namespace keyhole::runtime {

class KvLayer {
 public:
  KvLayer() = default;
  virtual ~KvLayer() = default;
  KvLayer(const KvLayer&) = delete;
  KvLayer& operator=(const KvLayer&) = delete;

  // Where tokens lie, of those that a step attends: sink, then offloaded rows, then the window.
  [[nodiscard]] virtual uint32_t sink() const = 0;
  [[nodiscard]] virtual uint32_t rows() const = 0;
  [[nodiscard]] virtual uint32_t window() const = 0;
  /// All tokens that have come, whether they are kept or not.
  [[nodiscard]] virtual uint32_t tokens() const = 0;
  /// The next token makes the window fall back to its newest ones; the others are offloaded.
  [[nodiscard]] virtual bool window_is_full() const = 0;
  /// Whether what leaves the window becomes offloaded rows, which can be searched and indexed.
  [[nodiscard]] virtual bool offloads() const = 0;
  /// A step attends to so many of the newest tokens; 0: to all of them.
  [[nodiscard]] virtual uint32_t reach() const = 0;

  /// Host memory that n tokens more will take; nothing where they come to memory that the sequence has from the
  /// beginning.
  [[nodiscard]] virtual std::optional<uint64_t> more_bytes(uint32_t n) const = 0;
  /// Appends the tokens of k and v, which hold equally many, all finite, and no more than max_tokens allows.
  virtual void append(const TensorView& k, const TensorView& v) = 0;
  /// Takes the newest token away, which is resident: the one that a failed step has appended.
  virtual void drop_newest() = 0;
  /// The oldest token that can be read: 0, or where the layer's window begins.
  [[nodiscard]] virtual uint32_t oldest() const = 0;
  /// Copies some tokens, all of them kept, in the model's dtype, to k and v `[tokens, kv_heads, head_dim]`.
  virtual void read(std::span<const uint32_t> tokens, std::byte* k, std::byte* v) const = 0;

  /// How many tokens of each kind remain of the first `tokens`; none where the layer does not offload.
  struct Split {
    uint32_t sink = 0, rows = 0, window = 0;
  };
  [[nodiscard]] virtual Split split(uint32_t tokens) const = 0;
  /// Throws Error(invalid_argument) where the layer does not keep what its first `tokens` tokens need to be attended
  /// again.
  virtual void check_truncation(uint32_t tokens) const = 0;
  /// Forgets all tokens but the first `tokens`. check_truncation() has let them pass.
  virtual void truncate(uint32_t tokens) = 0;
  /// Throws Error(invalid_argument) where the layer cannot drop some of the newest `of` tokens, so that its first
  /// `left` stay, and read `first_moved`, the first of those that will be appended again (nothing: none).
  virtual void check_drop(uint32_t left, std::optional<uint32_t> first_moved,
                          uint32_t of) const = 0;
  /// Whether the device can drop some of the newest tokens in the order of a stream.
  [[nodiscard]] virtual bool drops_on_device(uint32_t newest) const = 0;

  /// What a step attends beside the offloaded rows.
  [[nodiscard]] virtual gpu::Resident& resident() = 0;
  /// The token of the next step stands `ahead` tokens behind the newest one here, itself counted: tokens that are not
  /// here yet are part of what it reaches.
  virtual void set_ahead(uint32_t ahead) = 0;
};

}  // namespace keyhole::runtime

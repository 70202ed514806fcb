// Where the resident tokens (sink and window) of a session live and are attended. CUDA implements it on a GPU; a
// session on a host attends these tokens itself, with the same results up to rounding.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "cpu/layer_shape.h"
#include "cpu/tensor_view.h"
#include "cpu/types.h"
#include "gpu/exchange.h"
#include "gpu/step.h"

namespace keyhole::gpu {

/// Shape of the resident part of one session.
struct ResidentShape {
  uint32_t layers = 0;
  uint32_t q_heads = 0;
  uint32_t kv_heads = 0;
  uint32_t head_dim = 0;
  DType dtype = DType::f16;      ///< of K and V
  uint32_t sink = 0;             ///< S
  uint32_t window_capacity = 0;  ///< slots of the window: W plus one flush block
  uint32_t window = 0;           ///< W: what a full window falls back to in StreamSteps
  LogitParams logits;
  bool keeps_answers = false;               ///< there is memory for StreamSteps::answer()
  std::vector<LogitParams> layer_logits{};  ///< `[layers]`; empty: `logits` of all
  /// Heads of each layer where they differ, `[layers]`, in place of those above; without KV heads: the layer has no
  /// resident tokens. Such a session has one Resident for each shape (gpu/mixed_parts.h).
  std::vector<LayerShape> shapes{};
  std::vector<uint32_t>
      numbers{};  ///< `[layers]` of the model, for texts of errors; empty: 0, 1, ...

  [[nodiscard]] const LogitParams& logits_of(uint32_t layer) const {
    return logits_of_layer(logits, layer_logits, layer);
  }
  [[nodiscard]] uint32_t number_of(uint32_t layer) const {
    return layer < numbers.size() ? numbers[layer] : layer;
  }
};

/// What the parts of one session on a device share: one limit of memory, and how the device waits for the host. The
/// resident tokens of each shape of layers are such parts, and so is all that is made for them. One thread at a time.
struct SessionOnDevice {
  size_t memory_limit = 0;       ///< bytes of device memory for all of them; 0: what there is
  size_t claimed = 0;            ///< of it, so far
  std::optional<Signal> signal;  ///< what the first of them has chosen
};

/// What a device has to know of resident tokens to make other parts of their session beside them (codes, sliding
/// layers, attention of many tokens at once).
struct ResidentPlace {
  int ordinal = 0;                                     ///< the CUDA device on which they lie
  std::shared_ptr<SessionOnDevice> session = nullptr;  ///< null: they lie on no CUDA device
  ResidentShape shape{};
  RowWaits waits{};  ///< how kernels of their steps wait for rows that the host reads
};

/// Resident K and V of one session. One thread at a time. Every layer counts for itself.
/// Rows come and go as `[n, kv_heads, head_dim]` of `dtype`, contiguous, in host memory.
class Resident {
 public:
  virtual ~Resident() = default;

  /// Appends n tokens to the layer's sink. Precondition: the window is empty, sink_count + n <= sink.
  /// (append_window in turn comes after the sink is full.)
  virtual void append_sink(uint32_t layer, const std::byte* k, const std::byte* v, uint32_t n) = 0;
  /// Appends n tokens to the layer's window. Precondition: window_count + n <= window_capacity.
  virtual void append_window(uint32_t layer, const std::byte* k, const std::byte* v,
                             uint32_t n) = 0;
  /// Copies the oldest n window tokens to k and v, and drops them.
  virtual void evict(uint32_t layer, std::byte* k, std::byte* v, uint32_t n) = 0;
  /// Drops the newest tokens until `sink` and `window` of them are left.
  virtual void truncate(uint32_t layer, uint32_t sink, uint32_t window) = 0;
  [[nodiscard]] virtual uint32_t sink_count(uint32_t layer) const = 0;
  [[nodiscard]] virtual uint32_t window_count(uint32_t layer) const = 0;

  /// Partial attention of all query heads over sink and window. begin() publishes q (`[q_heads,
  /// head_dim]` fp32 host memory, which stays valid until end()); end() waits and writes
  /// o `[q_heads, head_dim]`, lse `[q_heads]`. Between them the caller runs host_tasks() tasks, in any
  /// order and on any threads (none where the device computes by itself). codes, where not null: the state is that of
  /// the resident tokens and of all rows that the layer has codes of, as in StreamSteps; no encoding is under way.
  virtual void attend_begin(uint32_t layer, const float* q, Codes* codes) = 0;
  void attend_begin(uint32_t layer, const float* q) { attend_begin(layer, q, nullptr); }
  [[nodiscard]] virtual uint32_t host_tasks() const = 0;
  virtual void run_host_task(uint32_t task) = 0;
  /// State of one KV head's group, o `[group, head_dim]`, lse `[group]`: valid once its host task, whose
  /// number is the KV head's, has run, until the next begin(). Null where the device computes by itself.
  [[nodiscard]] virtual StateView host_state(uint32_t kv_head) = 0;
  virtual void attend_end(StateView out) = 0;
  /// K and V of a KV head's resident tokens, sink then window, oldest first, where they lie in host memory for the host
  /// to attend without begin() and end(); no data where the device attends them. Valid until tokens come or go.
  [[nodiscard]] virtual KvView contiguous_rows(uint32_t /*layer*/, uint32_t /*kv_head*/) const {
    return {};
  }

  /// Copies the layer's resident tokens, sink then window, oldest first, to k and v
  /// (`[sink_count + window_count, kv_heads, head_dim]`); for saving and forking.
  virtual void read(uint32_t layer, std::byte* k, std::byte* v) const = 0;

  /// Steps in the order of a stream; null where the device has no streams.
  [[nodiscard]] virtual StreamSteps* stream_steps() { return nullptr; }

  /// Where these tokens lie, for Device::make_codes() and the like.
  [[nodiscard]] virtual ResidentPlace place() const { return {}; }
  /// The resident tokens that have this layer, where a session has a Resident for each shape of its layers
  /// (gpu/mixed_parts.h); else these themselves.
  [[nodiscard]] virtual Resident& of_layer(uint32_t /*layer*/) { return *this; }

  /// The resident tokens of all KV heads in host memory, sink first, oldest first, until the layer has others: with
  /// streams the host's copy of them (no step may be under way).
  [[nodiscard]] virtual KvPieces host_rows(uint32_t layer) {
    return stream_steps()->host_copy(layer);
  }
};

/// Bytes of K and V that a Resident of this shape holds on its device. Throws Error(invalid_argument) beyond 2^64 - 1.
[[nodiscard]] size_t resident_bytes(const ResidentShape& shape);
/// Bytes that a Resident of this shape takes on a CUDA device: resident_bytes() and what its steps compute with.
[[nodiscard]] size_t cuda_resident_bytes(const ResidentShape& shape);
/// Bytes of pinned host memory that it takes. (The host keeps a copy of the resident tokens beside that,
/// resident_bytes() of ordinary memory: a token that leaves the window is there already, and nothing is ever copied
/// back from the device.)
[[nodiscard]] size_t cuda_pinned_bytes(const ResidentShape& shape);

}  // namespace keyhole::gpu

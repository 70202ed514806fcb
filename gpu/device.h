// The device interface: where the resident tokens (sink and window) live and are attended. CUDA implements it on a
// GPU; a session on a host attends these tokens itself, with the same results up to rounding.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cpu/layer_shape.h"
#include "cpu/types.h"
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
  /// Heads of each layer where they differ, `[layers]`, in place of those above; without KV heads: the layer has no resident
  /// tokens. Such a session has one Resident for each shape (gpu/mixed_parts.h).
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
  /// K and V of a KV head's resident tokens, sink then window, oldest first, where they lie in host memory for the host to
  /// attend without begin() and end(); no data where the device attends them. Valid until tokens come or go.
  [[nodiscard]] virtual KvView contiguous_rows(uint32_t /*layer*/, uint32_t /*kv_head*/) const {
    return {};
  }

  /// Copies the layer's resident tokens, sink then window, oldest first, to k and v
  /// (`[sink_count + window_count, kv_heads, head_dim]`); for saving and forking.
  virtual void read(uint32_t layer, std::byte* k, std::byte* v) const = 0;

  /// Steps in the order of a stream; null where the device has no streams.
  [[nodiscard]] virtual StreamSteps* stream_steps() { return nullptr; }

  /// A KV head's resident tokens in host memory, sink first, oldest first, until the layer has others: with streams the
  /// host's copy of them (no step may be under way).
  [[nodiscard]] virtual ResidentRows host_rows(uint32_t layer, uint32_t kv_head) {
    return stream_steps()->host_copy(layer, kv_head);
  }
};

/// What all of a session's parts on a device have in common, also where there is a Resident for each shape of its layers. One thread
/// at a time.
struct SessionOnDevice {
  size_t memory_limit = 0;       ///< bytes of device memory for all of them; 0: what there is
  size_t claimed = 0;            ///< of it, so far
  std::optional<Signal> signal;  ///< what the first of them has chosen
};

/// How a CUDA device works for one session.
struct CudaConfig {
  int ordinal = 0;                      ///< which device
  bool probe_signal = true;             ///< choose `signal` by trying: a wait of some milliseconds
  Signal signal = Signal::device_wait;  ///< otherwise
  uint32_t timeout_ms = 10000;          ///< of waits on the device, and of waits for it
  size_t memory_limit = 0;  ///< bytes of device memory for all of the session's; 0: what there is
  std::shared_ptr<SessionOnDevice> session =
      nullptr;  ///< shared with the session's other Residents, and its limit counts; null: there are none
};

/// Resident K and V in the memory of a CUDA device. Throws Error: unsupported without CUDA or such a device,
/// out_of_device_memory (with the bytes needed and there; nothing is allocated then), device_error.
[[nodiscard]] std::unique_ptr<Resident> make_cuda_resident(const ResidentShape& shape,
                                                           const CudaConfig& config);

/// Bytes on the device, and pinned host memory, that make_cuda_resident() takes.
/// (The host keeps a copy of the resident tokens, resident_bytes() of ordinary memory: a token that leaves the window
/// is there already, and nothing is ever copied back from the device.)
[[nodiscard]] size_t cuda_resident_bytes(const ResidentShape& shape);
[[nodiscard]] size_t cuda_pinned_bytes(const ResidentShape& shape);

/// Bytes that a Resident of this shape takes on its device.
[[nodiscard]] size_t resident_bytes(const ResidentShape& shape);

struct DeviceInfo {
  std::string name;  ///< e.g. "NVIDIA H200"
  size_t memory_bytes = 0;
  int compute_major = 0, compute_minor = 0;
};

/// Why no session can run on the device; empty: it can. Kernels need compute capability 8.0 (asynchronous copies to
/// shared memory, bf16 on tensor cores).
[[nodiscard]] std::string unsupported_reason(const DeviceInfo& device);

/// Why sessions of models of this shape do not run on a device; empty: they do.
[[nodiscard]] std::string unsupported_shape(uint32_t q_heads, uint32_t kv_heads, uint32_t head_dim);

/// The GPUs that this build and machine can see; empty without CUDA. Never throws.
[[nodiscard]] std::vector<DeviceInfo> cuda_devices();

/// Bytes of a device's memory that are free now; 0 where there is no such device. Throws nothing.
[[nodiscard]] size_t cuda_free_bytes(int ordinal);

/// Why cuda_devices() is empty, for people: "built without CUDA", "no driver", ...
[[nodiscard]] std::string cuda_status();

}  // namespace keyhole::gpu

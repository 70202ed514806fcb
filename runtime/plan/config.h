// The C config structs, checked and completed: values that are AUTO or missing have been chosen.
#pragma once

#include <algorithm>
#include <functional>
#include <string>
#include <type_traits>
#include <vector>

#include "cpu/layer_shape.h"
#include "cpu/types.h"
#include "gpu/device.h"
#include "index/index.h"
#include "keyhole/keyhole.h"
#include "keyhole/layers.h"
#include "runtime/plan/budget.h"
#include "runtime/plan/head_numbers.h"

namespace keyhole::runtime {

inline constexpr uint32_t kMaxLayers = 1024;
inline constexpr uint32_t kMaxHeads = 4096;
inline constexpr uint32_t kMaxTokens = 1U << 31;

/// Gives the bytes of device memory that are free for codes of offloaded rows, beside resident tokens of this shape.
using CodeRoom = std::function<uint64_t(const gpu::ResidentShape&)>;

/// The window of a sliding layer.
struct Window {
  uint32_t tokens = 0;  ///< W, the tokens that a step attends to; 0: the layer does not slide
  uint32_t slack = 0;   ///< tokens kept behind them

  /// Slots of the layer's ring in sequences of at most max_tokens. There is at least one more than the window has,
  /// because a step that has taken a slot may fail and give it back.
  [[nodiscard]] uint32_t slots(uint32_t max_tokens) const {
    const uint64_t most = uint64_t{tokens} + (slack == 0 ? 1 : slack);
    return static_cast<uint32_t>(most < max_tokens ? most : max_tokens);
  }
};

/// Shape of the model, as every part of the runtime needs it.
struct ModelShape {
  uint32_t layers = 0;
  /// The shape of all layers where they are alike; otherwise the engine's fields, and of() or largest() give shapes.
  uint32_t q_heads = 0;
  uint32_t kv_heads = 0;
  uint32_t head_dim = 0;
  uint32_t value_dim = 0;          ///< see LayerShape
  std::vector<LayerShape> shapes;  ///< `[layers]`; empty: all are alike
  bool values_in_keys =
      false;  ///< values are the first components of the keys, and callers hand over none
  DType kv_dtype = DType::f16;
  LogitParams logits;
  std::vector<LogitParams> layer_logits;  ///< `[layers]`; empty: `logits` of all
  std::vector<float> sinks;     ///< learned, of each layer in turn `[q_heads]`; empty: none
  std::vector<Window> windows;  ///< `[layers]`; empty: no layer slides
  bool has_rope = false;        ///< RoPE's base was given, of one layer at least
  /// Of the engine's device, where that is known: they say whether its steps choose among lists of codes. Where they do
  /// not, there are no lists, and no memory for them.
  gpu::KernelLimits device_limits = {};

  [[nodiscard]] const LogitParams& logits_of(uint32_t layer) const {
    return logits_of_layer(logits, layer_logits, layer);
  }
  /// The learned sinks of a layer, `[q_heads]`, or those from a KV head's group on; null: none.
  [[nodiscard]] const float* sinks_of(uint32_t layer, uint32_t kv_head = 0) const {
    if (sinks.empty()) return nullptr;
    return sinks.data() + first_q_head(layer) + size_t{kv_head} * of(layer).group();
  }
  [[nodiscard]] LayerShape of(uint32_t layer) const {
    return shapes.empty() ? LayerShape{q_heads, kv_heads, head_dim, value_dim} : shapes[layer];
  }
  [[nodiscard]] bool layers_differ() const { return !shapes.empty(); }
  /// Number of query heads of all earlier layers.
  [[nodiscard]] size_t first_q_head(uint32_t layer) const;
  /// The largest value of each field over the layers; no single layer need have all of them.
  [[nodiscard]] LayerShape largest() const;
  [[nodiscard]] uint32_t largest_group() const;
  /// The largest result of `numbers` over the layers' shapes: the size of memory that any layer can work in.
  template <class Numbers>
  [[nodiscard]] size_t most(const Numbers& numbers) const {
    size_t all = numbers(of(0));
    for (const LayerShape& shape : shapes) all = std::max<size_t>(all, numbers(shape));
    return all;
  }
  [[nodiscard]] HeadNumbers head_numbers() const;
  [[nodiscard]] bool slides(uint32_t layer) const {
    return !windows.empty() && windows[layer].tokens != 0;
  }
  /// Number of layers that slide.
  [[nodiscard]] uint32_t sliding_layers() const;
  /// Number of layers up to the last that does not slide, 1 at least: those with resident tokens, and sliding ones
  /// between them.
  [[nodiscard]] uint32_t resident_layers() const;
  /// The shapes, `[resident_layers()]`, of the layers whose resident tokens a device has, where layers differ; layers
  /// that slide have no KV heads in it. Empty: all are alike.
  [[nodiscard]] std::vector<LayerShape> device_shapes() const;
  /// The largest finite number of kv_dtype.
  [[nodiscard]] float largest_element() const;
};

/// The audit_bound in effect where it is AUTO: 0.1, or 1.5 times the error target of a head that
/// has one.
inline constexpr float kDefaultAuditBound = 0.1F;
inline constexpr float kAuditBoundPerTarget = 1.5F;

/// How one sequence is split and searched: the numbers of keyhole_session_config in effect and, under the same names,
/// what that struct only points to. The struct's own pointers are NULL; public_config() fills them.
struct SessionParams : keyhole_session_config {
  SessionParams() : SessionParams(keyhole_session_config{}) {}
  /// Takes the numbers of a checked config as they are; completes those that are AUTO.
  explicit SessionParams(const keyhole_session_config& config);

  std::string index;
  Budget budget;
  std::string budgets;                 ///< path; empty: none
  std::vector<uint32_t> dense_layers;  ///< ascending
  /// The sliding layers of the model, ascending, which have no index either.
  std::vector<uint32_t> sliding_layers;
  /// The settings of each head by HeadNumbers; empty: all heads have `index` and `budget`.
  std::vector<HeadParams> heads;

  [[nodiscard]] HeadParams head(size_t i) const {
    return heads.empty() ? HeadParams{index, budget} : heads[i];
  }
  /// The bound of a head's audits: audit_bound or, where that is 0, the one that follows from the head's error
  /// target.
  [[nodiscard]] float audit_bound_of(const Budget& head) const {
    if (audit_bound > 0.0F) return audit_bound;
    return head.error_target > 0.0F ? kAuditBoundPerTarget * head.error_target : kDefaultAuditBound;
  }

  /// Whether a layer is attended exactly, by the caller's wish or because it slides.
  [[nodiscard]] bool is_dense(uint32_t layer) const;
  /// Offloaded rows come in multiples of this number: the rows of a block of codes where flush_block is a multiple of
  /// that, else 1 (then the device has no codes, and rows are not int8).
  [[nodiscard]] uint32_t row_block() const;
  /// The dtype of offloaded rows: the model's, or i8.
  [[nodiscard]] DType offload_dtype(const ModelShape& model) const {
    return kv_host == KEYHOLE_KV_HOST_INT8 ? DType::i8 : model.kv_dtype;
  }
  /// Bytes of host memory of `rows` offloaded rows of a layer: K and V of all KV heads, with their scales.
  [[nodiscard]] uint64_t offload_bytes(const ModelShape& model, uint32_t layer,
                                       uint64_t rows) const;
  /// Bytes of sink and window, over all layers that do not slide, where they lie in host memory.
  [[nodiscard]] uint64_t host_resident_bytes(const ModelShape& model) const;
  /// Number of tokens in each of the staging buffers through which tokens come and go.
  [[nodiscard]] uint64_t staging_tokens() const;
  [[nodiscard]] gpu::ResidentShape resident_shape(const ModelShape& model) const;
};

/// Reads a caller's size-first struct: copies min(struct_size, sizeof(T)) bytes over `defaults`. A struct of a newer
/// header is accepted if the fields that it has in addition are zero. Throws Error(invalid_argument) for NULL or a
/// size that no version had, Error(version) for a newer struct with fields that this library does not know.
template <class T>
[[nodiscard]] T read_struct(const T* from, T defaults, const char* name);

/// Fills a caller's size-first struct of `size` bytes, which may be another version's: writes no byte beyond, and
/// zeros where this version has nothing. Null, or too small for struct_size: writes nothing.
template <class T>
void init_struct(T* to, size_t size, std::type_identity_t<T> value) noexcept;

/// Writes a result into a caller's size-first struct, as much of it as the caller's version has.
template <class T>
void write_struct(T* to, T value, const char* name);

/// Returns the checked shape. Throws Error(invalid_argument) that names the field, the value and what is allowed.
[[nodiscard]] ModelShape check_model(const keyhole_engine_config& config);
/// Why a CUDA device does not take the model, as gpu::unsupported_shape() says it; empty: it does.
[[nodiscard]] std::string unsupported_on_device(const ModelShape& model);
/// Returns the RoPE parameters: one for all layers, or `[layers]`.
[[nodiscard]] std::vector<index::RopeParams> check_ropes(const keyhole_engine_config& config);
/// Returns layer_configs in this version's form, with AUTO values chosen; empty: all layers are alike.
[[nodiscard]] std::vector<keyhole_layer_config> read_layers(const keyhole_engine_config& config);
/// Chooses what is AUTO of RoPE, of a config that was checked and says that the model has it.
void complete_rope(keyhole_engine_config& config);
/// The layer config that the engine's own fields amount to.
[[nodiscard]] keyhole_layer_config layer_of(const keyhole_engine_config& config);
/// Checks and completes a session's config. room: the device memory that the index "auto" may take, see auto_index.h;
/// null: there is no such device.
[[nodiscard]] SessionParams check_session(const keyhole_session_config& config,
                                          const ModelShape& model, const CodeRoom& room = nullptr);
/// Of a new session, or a plan, on a host: throws Error(invalid_argument) where codes must lie on the device. Files of
/// earlier versions may say so.
void check_host_placement(const SessionParams& params);
void check_mode(keyhole_mode mode);

/// The config in effect as users read it back. Its pointers are valid until `params` changes.
[[nodiscard]] keyhole_session_config public_config(const SessionParams& params);
/// The config as the public init function fills it.
[[nodiscard]] keyhole_session_config initial_config();

// Definitions of the templates above.

void check_struct(const void* p, size_t struct_size, size_t known_size, const char* name);

template <class T>
T read_struct(const T* from, T defaults, const char* name) {
  check_struct(from, from == nullptr ? 0 : from->struct_size, sizeof(T), name);
  const size_t bytes = from->struct_size < sizeof(T) ? from->struct_size : sizeof(T);
  __builtin_memcpy(&defaults, from, bytes);
  defaults.struct_size = sizeof(T);
  return defaults;
}

template <class T>
void init_struct(T* to, size_t size, std::type_identity_t<T> value) noexcept {
  if (to == nullptr || size < sizeof(size_t)) return;
  value.struct_size = size;
  __builtin_memset(static_cast<void*>(to), 0, size);
  __builtin_memcpy(static_cast<void*>(to), &value, size < sizeof(T) ? size : sizeof(T));
}

template <class T>
void write_struct(T* to, T value, const char* name) {
  check_struct(to, to == nullptr ? 0 : to->struct_size, sizeof(T), name);
  value.struct_size = to->struct_size;
  __builtin_memcpy(to, &value, to->struct_size < sizeof(T) ? to->struct_size : sizeof(T));
}

}  // namespace keyhole::runtime

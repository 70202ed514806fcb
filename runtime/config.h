// The C config structs, checked and completed: what is AUTO or missing has been chosen.
#pragma once

#include <string>
#include <type_traits>
#include <vector>

#include "cpu/types.h"
#include "gpu/device.h"
#include "index/index.h"
#include "keyhole/keyhole.h"
#include "runtime/budget.h"

namespace keyhole::runtime {

inline constexpr uint32_t kMaxLayers = 1024;
inline constexpr uint32_t kMaxHeads = 4096;
inline constexpr uint32_t kMaxTokens = 1U << 31;

/// Shape of the model, as every part of the runtime needs it.
struct ModelShape {
  uint32_t layers = 0;
  uint32_t q_heads = 0;
  uint32_t kv_heads = 0;
  uint32_t head_dim = 0;
  DType kv_dtype = DType::f16;
  LogitParams logits;

  [[nodiscard]] uint32_t group() const { return q_heads / kv_heads; }
  [[nodiscard]] size_t row_bytes() const { return head_dim * dtype_size(kv_dtype); }
};

/// Output error beyond which an audit finds too much; of heads with an error target, so many times that.
inline constexpr float kDefaultAuditBound = 0.1F;
inline constexpr float kAuditBoundPerTarget = 1.5F;

/// How one sequence is split and searched.
struct SessionParams {
  uint32_t max_tokens = 0;
  uint32_t sink = 0;
  uint32_t window = 0;
  uint32_t flush_block = 0;
  std::string index;
  keyhole_mode mode = KEYHOLE_MODE_INDEXED;
  std::vector<uint32_t> dense_layers;
  uint32_t append_block = 0;
  uint32_t training_queries = 0;
  size_t host_memory_limit = 0;
  keyhole_append_mode append_mode = KEYHOLE_APPEND_BACKGROUND;
  Budget budget;
  uint32_t tail_partition = kDefaultTailPartition;
  std::string budgets;  ///< path; empty: none
  std::vector<HeadParams>
      heads;  ///< [layer * kv_heads + kv_head]; empty: all of `index` and `budget`

  [[nodiscard]] HeadParams head(size_t i) const {
    return heads.empty() ? HeadParams{index, budget} : heads[i];
  }
  size_t device_memory_limit = 0;
  keyhole_placement partitions = KEYHOLE_PLACE_AUTO;
  double audit_share = 0.0;
  keyhole_audit_action audit_action = KEYHOLE_AUDIT_REPORT;
  float audit_bound = 0.0F;  ///< 0: that of each head's error target

  [[nodiscard]] float audit_bound_of(const Budget& head) const {
    if (audit_bound > 0.0F) return audit_bound;
    return head.error_target > 0.0F ? kAuditBoundPerTarget * head.error_target : kDefaultAuditBound;
  }

  [[nodiscard]] bool is_dense(uint32_t layer) const;
  [[nodiscard]] gpu::ResidentShape resident_shape(const ModelShape& model) const;
  [[nodiscard]] gpu::PartitionsShape partitions_shape(const ModelShape& model, uint32_t room) const;
};

/// Copies min(struct_size, sizeof(T)) bytes of a caller's size-first struct over `defaults`. A struct of a
/// newer header is accepted if what it has grown by is zero. Throws Error(invalid_argument) for NULL or a
/// size that no version had, Error(version) for a newer struct with fields this library does not know.
template <class T>
[[nodiscard]] T read_struct(const T* from, T defaults, const char* name);

/// Fills a caller's size-first struct of `size` bytes, which may be another version's: no byte beyond, and zeros where
/// this version has nothing. Null, or too small for struct_size: nothing.
template <class T>
void init_struct(T* to, size_t size, std::type_identity_t<T> value) noexcept;

/// Writes a result into a caller's size-first struct, as much of it as the caller's version has.
template <class T>
void write_struct(T* to, T value, const char* name);

/// Throws Error(invalid_argument) that names the field, the value and what is allowed.
[[nodiscard]] ModelShape check_model(const keyhole_engine_config& config);
[[nodiscard]] index::RopeParams check_rope(const keyhole_engine_config& config);
[[nodiscard]] SessionParams check_session(const keyhole_session_config& config,
                                          const ModelShape& model);
void check_mode(keyhole_mode mode);

// ---- templates -----------------------------------------------------------------------------------

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

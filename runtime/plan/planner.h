// Plans the memory of a session before anything is allocated.
#pragma once

#include <cstdint>
#include <functional>

#include "runtime/plan/config.h"

namespace keyhole::runtime {

struct MemoryPlan {
  uint64_t kv_bytes = 0;
  uint64_t host_bytes = 0;
  uint64_t index_bytes = 0;
  uint64_t device_bytes = 0;
  uint64_t pinned_bytes = 0;
  uint64_t code_bytes = 0;       ///< of device_bytes
  uint64_t pinned_kv_bytes = 0;  ///< of host_bytes
  uint32_t code_layers = 0;      ///< whose codes lie on the device
  uint32_t first_code_layer = 0;
  bool rows_by_host =
      false;  ///< the exact ones of these layers; pinned_bytes has their exchange then
};

/// Plans for `context` tokens (at most kMaxTokens), with a CUDA device or with the host as the device. `device_limit`
/// (0: none) decides how many layers have their codes there. Throws Error(invalid_argument) where a size passes 2^63.
[[nodiscard]] MemoryPlan plan_memory(const ModelShape& model, const SessionParams& session,
                                     uint64_t context, uint32_t threads, bool host_device,
                                     uint64_t device_limit);

/// Whether a plan stays within limits (0: none). On a host device both parts share the host's memory.
[[nodiscard]] bool plan_fits(const MemoryPlan& plan, uint64_t device_limit, uint64_t host_limit,
                             uint64_t pinned_limit, bool host_device);

/// The most tokens whose plan fits; 0 if `least` tokens do not. plan_fits(tokens): whether one does; a plan that is
/// refused (Status::invalid_argument) does not.
[[nodiscard]] uint32_t longest_context(uint64_t least,
                                       const std::function<bool(uint64_t)>& plan_fits);

/// Bytes of host memory that searches in indexes of `rows` keys take beside the indexes, over all workers. Throws
/// Error(invalid_argument) beyond 2^63 bytes.
[[nodiscard]] uint64_t estimate_search_bytes(const ModelShape& model, const SessionParams& session,
                                             uint64_t rows, uint32_t threads);

}  // namespace keyhole::runtime

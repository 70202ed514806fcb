// Several tokens of a session with tensors in host memory: alone, and what a batch of sessions asks of each
// (host_batch.h).
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "runtime/session/host_extension.h"
#include "runtime/session/host_pattern.h"

namespace keyhole::runtime {

class HostExtends {
 public:
  /// All that it is given outlives it.
  HostExtends(const HostParts& host, HostStepper& stepper, HostMemory& memory,
              ExtendPatterns& patterns, ExtendedTokens& extended, const IndexKeeper& keeper)
      : pattern_(host.engine, host.sequence, patterns, host.prompts, memory, host.steps,
                 host.totals),
        parts_{host, stepper, memory, patterns, pattern_, extended, new_rows_},
        keeper_(&keeper) {}
  HostExtends(const HostExtends&) = delete;
  HostExtends& operator=(const HostExtends&) = delete;

  /// See keyhole_session_extend. Throws Error, and then has changed no token.
  void extend(uint32_t layer, const ExtendArgs& args) {
    HostExtension extension(parts_, layer, args);
    while (extension.start()) extension.finish();
    extension.append();
  }
  /// The states of what the layer holds, (0, -inf) for nothing, for tokens that are not appended: q and out
  /// `[n, q_heads, ..]`, lse `[n, q_heads]` or null.
  void answer(uint32_t layer, const TensorView& q, const TensorOut& out, float* lse);

  // For a batch.
  [[nodiscard]] std::unique_ptr<HostExtension> begin(uint32_t layer, const ExtendArgs& args) {
    return std::make_unique<HostExtension>(parts_, layer, args);
  }
  /// Whether both sessions hold enough of a layer's offloaded rows, or of their codes, in the same memory to read them
  /// together.
  [[nodiscard]] bool is_copy(uint32_t layer, const HostExtends& other) const;
  /// See Sequence::common_rows().
  [[nodiscard]] uint32_t common_rows(uint32_t layer, const HostExtends& other) const {
    return parts_.host.sequence.common_rows(layer, other.parts_.host.sequence);
  }
  [[nodiscard]] HostSteps& steps() { return parts_.host.steps; }

  /// Host memory for K and V of new tokens.
  [[nodiscard]] uint64_t bytes() const { return new_rows_.capacity(); }

 private:
  /// Whether enough of a layer's codes lies in the same memory for both.
  [[nodiscard]] bool has_codes_of(uint32_t layer, const HostExtends& other) const;

  std::vector<std::byte> new_rows_;  ///< K and V of an extension under way
  HostPattern pattern_;
  ExtensionParts parts_;
  const IndexKeeper* keeper_;
};

}  // namespace keyhole::runtime

// What steps over the codes of one session have in common, for each number of tokens that a step may have.
#pragma once

#include <cstdint>
#include <vector>

#include "gpu/codes_layout.h"
#include "gpu/cuda/codes/codes_kernels.h"

namespace keyhole::gpu {

class CodesVariants {
 public:
  CodesVariants() = default;
  /// On the current device, whose number is `ordinal`. resident_tokens: that a layer has at most. Throws Error:
  /// unsupported where a step of one token wants more shared memory than the device has; device_error.
  CodesVariants(const CodesShape& shape, const CodesLayout& layout, int ordinal,
                uint32_t resident_tokens);

  /// Tokens that a step may have: as many as the device has shared memory for, no more than most_step_tokens().
  [[nodiscard]] uint32_t most_tokens() const { return static_cast<uint32_t>(sizes_.size()); }
  /// Sizes, strides and choices of kernels of a step of 1..most_tokens() tokens; no pointers.
  [[nodiscard]] const CodesStep& of(uint32_t tokens) const { return sizes_[tokens - 1]; }

  /// Tokens that a step may have which chooses among lists; 0: the device has none of them.
  [[nodiscard]] uint32_t most_listed() const { return static_cast<uint32_t>(listed_.size()); }
  [[nodiscard]] bool has_lists() const { return !listed_.empty(); }
  /// What a step of 1..most_listed() tokens that chooses has in place of of().
  [[nodiscard]] const CodesStep& listed(uint32_t tokens) const { return listed_[tokens - 1]; }

 private:
  std::vector<CodesStep> sizes_;   ///< of 1, 2, ... tokens, without lists
  std::vector<CodesStep> listed_;  ///< with lists
};

}  // namespace keyhole::gpu

// The tensors of several new tokens of a layer (keyhole_session_extend).
#pragma once

#include <cstdint>

#include "runtime/engine/tensor.h"

namespace keyhole::runtime {

/// All in host memory or all on the device; q and out have as many tokens as k.
struct ExtendArgs {
  TensorView q, k, v;
  /// `[tokens]` words: bit j of word i says that token i sees token j. Null: a token sees all up to itself.
  const uint64_t* mask = nullptr;
  TensorOut out;
  float* lse = nullptr;  ///< `[tokens, q_heads]`; null: not wanted
};

/// Tokens [begin, begin + n) of `args`, with the mask of all of them.
[[nodiscard]] ExtendArgs slice(const ExtendArgs& args, uint32_t begin, uint32_t n);

/// Throws Error(invalid_argument) unless q, k and v hold equally many tokens, at least one, and the mask is one for
/// them.
void check_counts(const ExtendArgs& args);

}  // namespace keyhole::runtime

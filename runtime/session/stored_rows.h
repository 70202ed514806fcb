// K and V of a session's tokens, handed back in the tensors of a caller.
#pragma once

#include <cstdint>

#include "cpu/tensor_view.h"
#include "runtime/kv/sequence.h"

namespace keyhole::runtime {

/// Tokens [first, first + n) of a layer.
struct TokenRange {
  uint32_t layer = 0, first = 0, n = 0;
};

/// Copies them, wherever they lie, to k and v `[n, kv_heads, head_dim]` in host memory; null: not wanted. Of values as
/// many components are written as the model has. Throws Error(invalid_argument) for tokens that the layer does not
/// hold, Error(not_finite) for a number beyond the tensor's dtype, Error(device_error).
void read_rows(const Engine& engine, const Sequence& sequence, const TokenRange& tokens,
               const TensorOut* k, const TensorOut* v);

}  // namespace keyhole::runtime

// The heads of one layer: their number and dimensions may differ between the layers of a model.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/types.h"

namespace keyhole {

struct LayerShape {
  uint32_t q_heads = 0;
  uint32_t kv_heads = 0;
  uint32_t head_dim = 0;
  /// Components of values and outputs as callers see them, <= head_dim. Inside the library values are rows of
  /// head_dim components that end in zeros.
  uint32_t value_dim = 0;

  [[nodiscard]] uint32_t group() const { return q_heads / kv_heads; }
  [[nodiscard]] size_t row_bytes(DType dtype) const { return head_dim * dtype_size(dtype); }
  /// Bytes of the keys, or of the values, of one token over all KV heads.
  [[nodiscard]] size_t token_bytes(DType dtype) const { return kv_heads * row_bytes(dtype); }

  bool operator==(const LayerShape&) const = default;
};

}  // namespace keyhole

// Where tokens wait in the model's dtype between a caller's tensors, the device's window and host memory.
#pragma once

#include <cstdint>

#include "cpu/memory.h"
#include "runtime/engine/engine.h"
#include "runtime/engine/tensor.h"

namespace keyhole::runtime {

class Staging {
 public:
  /// For so many tokens of any layer. Throws Error(out_of_memory). The engine outlives it.
  Staging(const Engine& engine, uint64_t tokens);

  /// K and V `[tokens, kv_heads, head_dim]` of one layer after the other.
  [[nodiscard]] std::byte* k() { return k_.data(); }
  [[nodiscard]] std::byte* v() { return v_.data(); }
  /// Converts tokens [begin, begin + n) of the input to the layer's K or V.
  void stage(uint32_t layer, const TensorView& rows, uint32_t begin, uint32_t n,
             std::byte* to) const;
  [[nodiscard]] uint64_t bytes() const { return k_.bytes() + v_.bytes(); }

 private:
  const Engine* engine_;
  // Address space for the longest window that the config allows; memory comes as tokens do.
  cpu::ReservedBuffer k_, v_;
};

}  // namespace keyhole::runtime

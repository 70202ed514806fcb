// K and V of a layer on the card: llama.cpp's own cells, of which those have memory that are used.
#pragma once

#include <ggml.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tools/engines/llama.cpp/cuda/card_memory.h"
#include "tools/engines/llama.cpp/session.h"

namespace keyhole::llama_cpp {

class CardRows {
 public:
  /// The tensor of keys or values, which lies in `memory`, at `tensor->data`.
  void set(const ggml_tensor* tensor, bool values) { tensors_[values ? 1 : 0] = tensor; }
  [[nodiscard]] const ggml_tensor* tensor(bool values) const { return tensors_[values ? 1 : 0]; }

  /// Gives memory to the first `cells` cells of a stream, and to some behind them. False: the card has too little.
  [[nodiscard]] bool hold(CardMemory& memory, uint32_t stream, uint32_t cells);
  /// Gives memory to whatever lies at these bytes of the keys or values.
  [[nodiscard]] bool hold_bytes(CardMemory& memory, bool values, size_t offset, size_t bytes);
  void let_go(CardMemory& memory);
  /// Copies rows of `count` cells from number `first` on, counted through all streams, to the host's memory, as
  /// CardMemory::read() does.
  void read(const CardMemory& memory, bool values, size_t first, size_t count,
            std::byte* out) const;
  /// Gives memory to these cells, and copies their rows from the host's memory. False: the card has too little.
  [[nodiscard]] bool write(CardMemory& memory, bool values, size_t first, size_t count,
                           const std::byte* from);

  /// K or V of cells that lie one after the other, `heads` heads in each.
  [[nodiscard]] Rows rows(bool values, uint32_t stream, uint32_t cell, uint32_t count,
                          uint32_t heads) const;

 private:
  const ggml_tensor* tensors_[2] = {nullptr, nullptr};  // keys, values
  std::vector<uint32_t> held_;                          // cells, of each stream
};

}  // namespace keyhole::llama_cpp

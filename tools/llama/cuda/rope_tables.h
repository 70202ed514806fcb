// RoPE of a stretch of tokens on the device, for each kind of layer of a model.
#pragma once

#include <vector_types.h>

#include <cstddef>
#include <cstdint>

#include "tools/llama/config.h"
#include "tools/llama/cuda/memory.h"
#include "tools/llama/rope.h"

namespace keyhole::tools::cuda {

/// (cos, sin), times the scaling's factor, for consecutive positions. Borrows the config.
class RopeTables {
 public:
  /// `rope_tokens` chooses between LongRoPE's frequencies. Takes room for `tokens` tokens (gpu_sizes.h counts it).
  RopeTables(const LlamaConfig& config, size_t rope_tokens, size_t tokens);

  /// Enqueues the computation for positions first .. first + n - 1. Throws std::runtime_error where LongRoPE's
  /// frequencies end before these.
  void fill(size_t first, size_t n, cudaStream_t stream);
  /// The table of a layer from the i-th of these positions on: `[.., pairs(layer)]`.
  [[nodiscard]] const float2* of(uint32_t layer, size_t i) const {
    const Table& table = this->table(layer);
    return table.turns.get() + i * table.pairs;
  }
  [[nodiscard]] uint32_t pairs(uint32_t layer) const { return table(layer).pairs; }

 private:
  struct Table {
    double factor;
    size_t end;
    uint32_t pairs;
    Buffer<double> frequencies;
    Buffer<float2> turns;
    Table(const Rope& rope, double attention_factor, size_t tokens);
  };
  [[nodiscard]] const Table& table(uint32_t layer) const {
    return config_.slides(layer) ? sliding_ : full_;
  }

  const LlamaConfig& config_;
  Table full_, sliding_;  // the latter empty where no layer slides
};

}  // namespace keyhole::tools::cuda

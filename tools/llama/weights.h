// The weights of a Hugging Face Llama folder in fp32, laid out for this decoder.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <vector>

#include "tools/llama/config.h"

namespace keyhole::tools {

/// A row-major matrix `[rows, cols]`; a linear layer computes y = W x (torch's layout).
struct Matrix {
  size_t rows = 0;
  size_t cols = 0;
  std::vector<float> data;
  /// The same numbers in bf16 where all of them are bf16 numbers (most checkpoints), else empty. A
  /// decoding step reads every weight once, so that half the bytes are half the time.
  std::vector<uint16_t> bf16;

  [[nodiscard]] const float* row(size_t i) const { return data.data() + i * cols; }
};

struct LayerWeights {
  std::vector<float> attention_norm;  ///< `[hidden]`
  Matrix qkv;                   ///< `[(Hq + 2*Hkv)*d, hidden]`: q, k, v rows one below the other
  Matrix output;                ///< `[hidden, Hq*d]`
  std::vector<float> mlp_norm;  ///< `[hidden]`
  Matrix gate_up;               ///< `[2*intermediate, hidden]`: gate rows, then up rows
  Matrix down;                  ///< `[hidden, intermediate]`
};

/// A model in memory. Projections that read the same input are fused, so that each is one product.
struct LlamaModel {
  LlamaConfig config;
  Matrix embedding;  ///< `[vocab, hidden]`
  std::vector<LayerWeights> layers;
  std::vector<float> final_norm;  ///< `[hidden]`
  Matrix lm_head;                 ///< `[vocab, hidden]`; empty if tied

  [[nodiscard]] const Matrix& output_projection() const {
    return config.tied_output ? embedding : lm_head;
  }
};

/// Loads config.json and model.safetensors, or the shards that model.safetensors.index.json names, from
/// `folder`; F32, F16 and BF16. Throws std::runtime_error that names the file and the tensor for: a file
/// that is absent or corrupt, a tensor that is missing or has another shape or dtype, and tensors that
/// this architecture has no use for (weights that were ignored would silently give wrong text).
[[nodiscard]] LlamaModel load_llama(const std::filesystem::path& folder);

}  // namespace keyhole::tools

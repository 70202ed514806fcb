// The weights of a Hugging Face folder, in the dtype of their file, laid out for this decoder.
#pragma once

#include <cstddef>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "tools/llama/checkpoint.h"
#include "tools/llama/config.h"
#include "tools/llama/matrix.h"

namespace keyhole::tools {

/// Vectors and matrices of a layer. A vector is empty where the family has none.
struct LayerWeights {
  std::vector<float> attention_norm;  ///< `[hidden]`
  Matrix qkv;  ///< `[(Hq + 2*Hkv)*d, hidden]`: q, k, v rows one below the other
  std::vector<float> qkv_bias;
  std::vector<float> q_norm, k_norm;  ///< `[d]`, of each head
  Matrix output;                      ///< `[hidden, Hq*d]`
  std::vector<float> output_bias;
  std::vector<float> output_norm;  ///< `[hidden]`: of attention's output
  std::vector<float> mlp_norm;     ///< `[hidden]`
  Matrix gate_up;                  ///< `[2*intermediate, hidden]`: gate rows, then up rows
  std::vector<float> gate_up_bias;
  Matrix down;  ///< `[hidden, intermediate]`
  std::vector<float> down_bias;
  std::vector<float> mlp_output_norm;  ///< `[hidden]`: of the MLP's output
};

/// A model in memory. Vectors are fp32 (norms as factors); matrices lie in the mapped files, which live as long as
/// the model does and must not be changed meanwhile.
struct LlamaModel {
  LlamaConfig config;
  Matrix embedding;  ///< `[vocab, hidden]`
  std::vector<LayerWeights> layers;
  std::vector<float> final_norm;            ///< `[hidden]`
  Matrix lm_head;                           ///< `[vocab, hidden]`; empty if tied
  std::shared_ptr<const Checkpoint> files;  ///< what the matrices point into
  /// Copies of tensors that begin at an address that is no multiple of their numbers' size, which old files may have.
  std::vector<std::shared_ptr<const std::vector<std::byte>>> aligned;

  [[nodiscard]] const Matrix& output_projection() const {
    return config.tied_output ? embedding : lm_head;
  }

  /// Calls visit(matrix) for each, in the order in which a step reads them.
  template <class Visit>
  void for_each_matrix(const Visit& visit) const {
    visit(embedding);
    for (const LayerWeights& layer : layers) {
      for (const Matrix* matrix : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down}) {
        visit(*matrix);
      }
    }
    if (!config.tied_output) visit(lm_head);
  }
};

/// Opens config.json and model.safetensors, or the shards that model.safetensors.index.json names, in
/// `folder`; F32, F16 and BF16. Everything is checked and nothing but headers and vectors is read: see read_ahead().
/// Throws std::runtime_error that names the file and the tensor for: a file that is absent or corrupt, a tensor that is
/// missing or has another shape or dtype, and tensors that this architecture has no use for (weights that were ignored
/// would silently give wrong text).
[[nodiscard]] LlamaModel load_llama(const std::filesystem::path& folder);

/// Whether a tensor may be left in its file: it follows from what is read, or belongs to a part that is not run.
[[nodiscard]] bool stays_in_file(const std::string& name, const LlamaConfig& config);

}  // namespace keyhole::tools

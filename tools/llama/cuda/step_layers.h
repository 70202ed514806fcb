// One token through the layers, without attention: the kernels of step_kernels.h where they cover everything that a
// layer has, else plain products with family_kernels.h between them.
#pragma once

#include "tools/llama/cuda/device_model.h"
#include "tools/llama/cuda/prefill_kernels.h"
#include "tools/llama/rope.h"

namespace keyhole::tools::cuda {

/// Enqueues the logits `[vocab]` of a token's last hidden state `[hidden]`, with the model's soft-cap.
void output_logits(const LlamaConfig& config, const GpuModel::Device& device, const float* hidden,
                   float* out, cudaStream_t stream);

/// The arguments of finish_heads() that follow from a layer; the caller adds the input, its length and the outputs.
[[nodiscard]] Heads heads_of(const LlamaConfig& config, const GpuModel::Device& device,
                             uint32_t layer);

/// Holds a token's hidden state. Everything is enqueued and can be captured, because arrays stay where they are.
/// Borrows the model.
class StepLayers {
 public:
  /// `rope_tokens` chooses between LongRoPE's frequencies.
  StepLayers(const GpuModel& model, size_t rope_tokens);

  /// Takes the frequencies of a sequence of `tokens` tokens from now on. Waits for nothing; nothing may be under way.
  void set_rope(size_t tokens);
  /// Throws std::runtime_error where LongRoPE's frequencies end before this position.
  void check_position(size_t position) const;

  /// Begins with the hidden state of the token in device memory, and RoPE's turns of its position.
  void begin(const StepInput* input, cudaStream_t stream);
  /// Computes qkv `[(q_heads + 2 kv_heads) * d]`: q, k and v of a layer, as attention takes them.
  void project(uint32_t layer, float* qkv, cudaStream_t stream);
  /// Computes hidden += W_o * attended `[q_heads * d]`.
  void add_attended(uint32_t layer, const float* attended, cudaStream_t stream);
  /// Computes hidden += MLP(hidden).
  void mlp(uint32_t layer, cudaStream_t stream);
  /// Writes the logits `[vocab]`.
  void logits(float* out, cudaStream_t stream);

 private:
  /// RoPE of one kind of layer.
  struct Turn {
    uint32_t head_dim;
    const RopeSettings& settings;
    size_t end = 0;
    uint32_t pairs;
    Buffer<double> frequencies;
    Buffer<float2> turns;
    Turn(uint32_t head_dim, const RopeSettings& settings, bool used);
    void set_rope(size_t tokens);
  };
  [[nodiscard]] const Turn& turn(uint32_t layer) const {
    return config_.slides(layer) ? sliding_ : full_;
  }
  /// Computes hidden += W x with its bias and norm.
  void add_product(const DeviceMatrix& w, const float* x, const Buffer<float>& bias,
                   const Buffer<float>& norm, cudaStream_t stream);
  [[nodiscard]] bool is_plain_rope() const;

  const LlamaConfig& config_;
  const GpuModel::Device& device_;
  Buffer<float> hidden_, inner_;
  Buffer<float> product_;  // of what has more behind it: qkv, gate and up, or an update
  Turn full_, sliding_;    // the latter empty where no layer slides
};

}  // namespace keyhole::tools::cuda

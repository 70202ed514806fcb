// A chunk of tokens through the layers, without attention: what a prompt and the tokens behind one have in common.
#pragma once

#include <span>

#include "tools/llama/cuda/device_model.h"
#include "tools/llama/cuda/prefill_kernels.h"
#include "tools/llama/cuda/products.h"
#include "tools/llama/cuda/rope_tables.h"
#include "tools/llama/gpu_sizes.h"

namespace keyhole::tools::cuda {

/// Device memory for numbers that are sums of two bf16, or one bf16 each, which have no low part.
struct SplitBuffer {
  Buffer<__nv_bfloat16> high, low;
  SplitBuffer(size_t count, bool rounded) : high(count), low(rounded ? 0 : count) {}
  [[nodiscard]] SplitOut out() const { return {high.get(), low.get()}; }
  [[nodiscard]] Split in() const { return {high.get(), low.get()}; }
};

/// Computes with rows of tokens; enqueues everything on one stream. rounded: GpuModel::rounds_activations(). `hidden`
/// are the tokens' hidden states, fp32 `[count, hidden]`; counts are at most sizes.chunk. Borrows the model.
class TokenRows {
 public:
  TokenRows(const GpuModel& model, const GpuChunkSizes& sizes, bool rounded, cudaStream_t stream);

  /// Writes the hidden states of n tokens (any number), whose ids are in device memory.
  void embed(const uint32_t* tokens, size_t n, float* hidden) const;
  /// Computes q, k and v of a layer, and returns the arguments of finish_heads() without its outputs.
  [[nodiscard]] Heads project(uint32_t layer, const float* hidden, size_t count,
                              const RopeTables& ropes, size_t first_turn);
  /// Where attention leaves its result, `[count, q_heads, d]`.
  [[nodiscard]] SplitOut attended() const { return attended_.out(); }
  /// Whether that is one bf16 a number.
  [[nodiscard]] bool is_rounded() const { return is_rounded_; }
  /// Memory for this many numbers, free between the end of finish_heads() and output_and_mlp().
  [[nodiscard]] float* spare() const { return wide_.get(); }
  /// Computes hidden += W_o * attended, then hidden += MLP(hidden).
  void output_and_mlp(uint32_t layer, float* hidden, size_t count);
  /// Writes the logits `[vocab]` that follow one token. Waits for the stream.
  void logits(const float* hidden, std::span<float> out) const;

 private:
  /// Computes hidden += W x with its bias and norm.
  void add_product(const DeviceMatrix& w, const SplitBuffer& x, size_t count,
                   const Buffer<float>& bias, const Buffer<float>& norm, float* hidden);
  void multiply(const DeviceMatrix& w, const SplitBuffer& x, size_t count, float* y, bool add);

  const LlamaConfig& config_;
  const GpuModel::Device& device_;
  cudaStream_t stream_;
  bool is_rounded_;
  Products products_;
  Buffer<float> wide_;  // [chunk, qkv] or [chunk, gate and up]
  SplitBuffer normed_, attended_, inner_;
};

}  // namespace keyhole::tools::cuda

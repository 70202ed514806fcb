#include "tools/llama/cuda/token_rows.h"

#include "tools/llama/cuda/family_kernels.h"
#include "tools/llama/cuda/step_layers.h"

namespace keyhole::tools::cuda {

TokenRows::TokenRows(const GpuModel& model, const GpuChunkSizes& sizes, bool rounded,
                     cudaStream_t stream)
    : config_(model.host().config),
      device_(model.device()),
      stream_(stream),
      is_rounded_(rounded),
      wide_(sizes.wide),
      normed_(sizes.normed, rounded),
      attended_(sizes.attended, rounded),
      inner_(sizes.inner, rounded) {}

void TokenRows::embed(const uint32_t* tokens, size_t n, float* hidden) const {
  embed_tokens(tokens, static_cast<uint32_t>(n), device_.embedding.split(), config_.hidden_size,
               static_cast<float>(config_.embedding_scale), hidden, stream_);
}

Heads TokenRows::project(uint32_t layer, const float* hidden, size_t count, const RopeTables& ropes,
                         size_t first_turn) {
  const DeviceLayer& weights = device_.layers[layer];
  normalise_tokens(hidden, weights.attention_norm.get(), device_.eps, static_cast<uint32_t>(count),
                   config_.hidden_size, normed_.out(), stream_);
  multiply(weights.qkv, normed_, count, wide_.get(), false);
  Heads heads = heads_of(config_, device_, layer);
  heads.qkv = wide_.get();
  heads.table = ropes.of(layer, first_turn);
  heads.pairs = ropes.pairs(layer);
  heads.n = static_cast<uint32_t>(count);
  return heads;
}

void TokenRows::output_and_mlp(uint32_t layer, float* hidden, size_t count) {
  const DeviceLayer& weights = device_.layers[layer];
  const auto n = static_cast<uint32_t>(count);
  add_product(weights.output, attended_, count, weights.output_bias, weights.output_norm, hidden);
  normalise_tokens(hidden, weights.mlp_norm.get(), device_.eps, n, config_.hidden_size,
                   normed_.out(), stream_);
  GateUp gate_up{wide_.get(), weights.gate_up_bias.get(), n, config_.intermediate_size,
                 config_.activation == Activation::gelu_tanh};
  const DeviceMatrix& w = weights.gate_up;
  if (is_rounded_ && !w.low) {
    // The widest numbers of a layer, which are about to be rounded anyway: in fp32 they take a tenth of its time
    // without attention.
    auto* const rounded = reinterpret_cast<__nv_bfloat16*>(wide_.get());
    products_.multiply({normed_.in(), w.split(), nullptr, n, w.rows, w.columns, false, rounded},
                       stream_);
    gate_up.rounded = rounded;
  } else {
    multiply(w, normed_, count, wide_.get(), false);
  }
  activate_tokens(gate_up, inner_.out(), stream_);
  add_product(weights.down, inner_, count, weights.down_bias, weights.mlp_output_norm, hidden);
}

void TokenRows::add_product(const DeviceMatrix& w, const SplitBuffer& x, size_t count,
                            const Buffer<float>& bias, const Buffer<float>& norm, float* hidden) {
  if (!bias && !norm) {
    multiply(w, x, count, hidden, true);
    return;
  }
  multiply(w, x, count, wide_.get(), false);  // what lay there has been used
  add_update({wide_.get(), bias.get(), norm.get(), device_.eps, static_cast<uint32_t>(count),
              config_.hidden_size},
             hidden, stream_);
}

void TokenRows::logits(const float* hidden, std::span<float> out) const {
  const Buffer<float> result(out.size());
  output_logits(config_, device_, hidden, result.get(), stream_);
  check(
      cudaMemcpyAsync(out.data(), result.get(), out.size_bytes(), cudaMemcpyDeviceToHost, stream_),
      "the logits");
  check(cudaStreamSynchronize(stream_), "a prompt");
}

void TokenRows::multiply(const DeviceMatrix& w, const SplitBuffer& x, size_t count, float* y,
                         bool add) {
  products_.multiply({x.in(), w.split(), y, static_cast<uint32_t>(count), w.rows, w.columns, add},
                     stream_);
}

}  // namespace keyhole::tools::cuda

#include "tools/llama/cuda/step_layers.h"

#include "tools/llama/cuda/family_kernels.h"
#include "tools/llama/gpu_sizes.h"

namespace keyhole::tools::cuda {

StepLayers::Turn::Turn(uint32_t dim, const RopeSettings& rope_settings, bool used)
    : head_dim(dim),
      settings(rope_settings),
      pairs(rope_settings.dims / 2),
      frequencies(used ? pairs : 0),
      turns(used ? pairs : 0) {}

void StepLayers::Turn::set_rope(size_t tokens) {
  const Rope rope(head_dim, settings, tokens);
  end = rope.end();
  copy_now(frequencies.get(), rope.frequencies().data(), frequencies.size());
}

StepLayers::StepLayers(const GpuModel& model, size_t rope_tokens)
    : config_(model.host().config),
      device_(model.device()),
      hidden_(config_.hidden_size),
      inner_(config_.intermediate_size),
      product_(gpu_chunk_sizes(config_, 1).wide),
      full_(config_.head_dim, config_.rope, true),
      sliding_(config_.head_dim, config_.sliding_rope, config_.full_layers() < config_.layers) {
  set_rope(rope_tokens);
}

void StepLayers::set_rope(size_t tokens) {
  full_.set_rope(tokens);
  sliding_.set_rope(tokens);
}

void StepLayers::check_position(size_t position) const {
  for (const Turn* turn : {&full_, &sliding_}) {
    if (turn->turns) check_rope_end(position + 1, turn->end);
  }
}

bool StepLayers::is_plain_rope() const {
  return !sliding_.turns && config_.rope.scaling.attention_factor == 1.0;
}

void StepLayers::begin(const StepInput* input, cudaStream_t stream) {
  const Split table = device_.embedding.split();
  if (config_.embedding_scale == 1.0 && is_plain_rope()) {
    begin_step(input, table, config_.hidden_size, full_.frequencies.get(), full_.pairs,
               hidden_.get(), full_.turns.get(), stream);
    return;
  }
  embed_tokens(&input->token, 1, table, config_.hidden_size,
               static_cast<float>(config_.embedding_scale), hidden_.get(), stream);
  for (const Turn* turn : {&full_, &sliding_}) {
    if (!turn->turns) continue;
    step_turns(input, turn->frequencies.get(), turn->pairs, turn->settings.scaling.attention_factor,
               turn->turns.get(), stream);
  }
}

void StepLayers::project(uint32_t layer, float* qkv, cudaStream_t stream) {
  const DeviceLayer& weights = device_.layers[layer];
  const Turn& turn = this->turn(layer);
  const Norm norm = device_.norm(weights.attention_norm);
  if (!weights.qkv_bias && !weights.q_norm && 2 * turn.pairs == config_.head_dim) {
    step_qkv(weights.qkv.step(), hidden_.get(), norm, turn.turns.get(), turn.pairs,
             config_.q_heads + config_.kv_heads, qkv, stream);
    return;
  }
  step_logits(weights.qkv.step(), hidden_.get(), norm, product_.get(), stream);
  Heads heads = heads_of(config_, device_, layer);
  heads.qkv = product_.get();
  heads.table = turn.turns.get();
  heads.pairs = turn.pairs;
  heads.n = 1;
  heads.q_out = qkv;
  heads.k_out = qkv + config_.q_width();
  heads.v_out = qkv + config_.q_width() + config_.kv_width();
  finish_heads(heads, stream);
}

void StepLayers::add_attended(uint32_t layer, const float* attended, cudaStream_t stream) {
  const DeviceLayer& weights = device_.layers[layer];
  add_product(weights.output, attended, weights.output_bias, weights.output_norm, stream);
}

void StepLayers::mlp(uint32_t layer, cudaStream_t stream) {
  const DeviceLayer& weights = device_.layers[layer];
  const Norm norm = device_.norm(weights.mlp_norm);
  const bool gelu = config_.activation == Activation::gelu_tanh;
  if (!weights.gate_up_bias && !gelu) {
    step_gate_up(weights.gate_up.step(), hidden_.get(), norm, inner_.get(), stream);
  } else {
    step_logits(weights.gate_up.step(), hidden_.get(), norm, product_.get(), stream);
    activate_rows({product_.get(), weights.gate_up_bias.get(), 1, config_.intermediate_size, gelu},
                  inner_.get(), stream);
  }
  add_product(weights.down, inner_.get(), weights.down_bias, weights.mlp_output_norm, stream);
}

Heads heads_of(const LlamaConfig& config, const GpuModel::Device& device, uint32_t layer) {
  const DeviceLayer& weights = device.layers[layer];
  Heads heads;
  heads.q_heads = config.q_heads;
  heads.kv_heads = config.kv_heads;
  heads.head_dim = config.head_dim;
  heads.bias = weights.qkv_bias.get();
  heads.q_norm = weights.q_norm.get();
  heads.k_norm = weights.k_norm.get();
  heads.eps = device.eps;
  return heads;
}

void output_logits(const LlamaConfig& config, const GpuModel::Device& device, const float* hidden,
                   float* out, cudaStream_t stream) {
  step_logits(device.output_projection().step(), hidden, device.norm(device.final_norm), out,
              stream);
  if (config.final_softcap > 0.0) {
    soft_cap(static_cast<float>(config.final_softcap), config.vocab_size, out, stream);
  }
}

void StepLayers::logits(float* out, cudaStream_t stream) {
  output_logits(config_, device_, hidden_.get(), out, stream);
}

void StepLayers::add_product(const DeviceMatrix& w, const float* x, const Buffer<float>& bias,
                             const Buffer<float>& norm, cudaStream_t stream) {
  if (!bias && !norm) {
    step_add(w.step(), x, hidden_.get(), stream);
    return;
  }
  step_logits(w.step(), x, {}, product_.get(), stream);
  add_update({product_.get(), bias.get(), norm.get(), device_.eps, 1, config_.hidden_size},
             hidden_.get(), stream);
}

}  // namespace keyhole::tools::cuda

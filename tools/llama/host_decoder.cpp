#include "tools/llama/host_decoder.h"

#include <algorithm>
#include <chrono>

#include "tools/llama/vector_math.h"

namespace keyhole::tools {
namespace {

/// Adds the time since the former call to the phase that has ended.
class Stopwatch {
 public:
  void skip() { last_ = Clock::now(); }
  void add_to(double& phase) {
    const Clock::time_point now = Clock::now();
    phase += std::chrono::duration<double>(now - last_).count();
    last_ = now;
  }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point last_ = Clock::now();
};

}  // namespace

HostDecoder::HostDecoder(const LlamaModel& model, KeyholeCache& cache, Team& team, uint32_t tokens)
    : model_(model), cache_(cache), team_(team), rope_(model.config), tokens_(tokens) {
  const LlamaConfig& config = model.config;
  hidden_.resize(config.hidden_size);
  normed_.resize(config.hidden_size);
  qkv_.resize(config.q_width() + 2 * config.kv_width());
  attended_.resize(config.q_width());
  gate_up_.resize(2 * size_t{config.intermediate_size});
  update_.resize(config.hidden_size);
  logits_.resize(config.vocab_size);
  cosines_.resize(config.head_dim / 2);
  sines_.resize(config.head_dim / 2);
}

std::span<const float> HostDecoder::prefill(std::span<const uint32_t> tokens,
                                            const PrefillProgress& progress) {
  logits_ = tools::prefill(
      model_, team_, tokens, [this](const LayerChunk& chunk) { cache_.prefill(chunk); }, progress);
  tokens_ = static_cast<uint32_t>(tokens.size());
  return logits_;
}

std::span<const float> HostDecoder::step(uint32_t token) {
  check_tokens(model_.config, {&token, 1});
  Stopwatch stopwatch;
  model_.embedding.rows_to_f32(token, token + 1, hidden_.data());
  rope_.angles(tokens_, cosines_.data(), sines_.data());
  for (uint32_t layer = 0; layer < model_.config.layers; ++layer) {
    const LayerWeights& weights = model_.layers[layer];
    float* q = qkv_.data();
    float* k = q + model_.config.q_width();
    float* v = k + model_.config.kv_width();
    normalise(weights.attention_norm);
    multiply(weights.qkv, normed_.data(), team_, qkv_.data());
    rope_.rotate(q, model_.config.q_heads, cosines_.data(), sines_.data());
    rope_.rotate(k, model_.config.kv_heads, cosines_.data(), sines_.data());
    stopwatch.add_to(times_.projections);

    cache_.attend(layer, q, k, v, attended_.data());
    stopwatch.add_to(times_.attention);
    if (hook_) {
      hook_(layer, q, attended_.data());
      stopwatch.skip();
    }

    multiply(weights.output, attended_.data(), team_, update_.data());
    add(update_.data(), update_.size(), hidden_.data());
    stopwatch.add_to(times_.projections);

    normalise(weights.mlp_norm);
    multiply(weights.gate_up, normed_.data(), team_, gate_up_.data());
    const size_t inner = model_.config.intermediate_size;
    silu_multiply(gate_up_.data(), gate_up_.data() + inner, inner, gate_up_.data());
    multiply(weights.down, gate_up_.data(), team_, update_.data());
    add(update_.data(), update_.size(), hidden_.data());
    stopwatch.add_to(times_.mlp);
  }
  normalise(model_.final_norm);
  multiply(model_.output_projection(), normed_.data(), team_, logits_.data());
  stopwatch.add_to(times_.logits);
  ++times_.steps;
  ++tokens_;
  return logits_;
}

void HostDecoder::truncate(uint32_t tokens) {
  cache_.truncate(tokens);
  tokens_ = std::min(tokens_, tokens);
}

void HostDecoder::normalise(const std::vector<float>& weight) {
  rms_norm(hidden_.data(), weight.data(), hidden_.size(),
           static_cast<float>(model_.config.rms_norm_eps), normed_.data());
}

uint32_t greedy(std::span<const float> logits) {
  return static_cast<uint32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

}  // namespace keyhole::tools

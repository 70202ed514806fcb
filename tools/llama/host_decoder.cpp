#include "tools/llama/host_decoder.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>

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

HostDecoder::Turn::Turn(uint32_t head_dim, const RopeSettings& settings, size_t rope_tokens)
    : rope(head_dim, settings, rope_tokens), cosines(rope.pairs()), sines(rope.pairs()) {}

void HostDecoder::Turn::set(uint32_t position) {
  check_rope_end(size_t{position} + 1, rope.end());
  rope.angles(position, cosines.data(), sines.data());
}

HostDecoder::HostDecoder(const LlamaModel& model, KeyholeCache& cache, Team& team, HeldTokens held,
                         PrefillHooks hooks)
    : model_(model),
      cache_(cache),
      team_(team),
      math_(model.config),
      full_(model.config.head_dim, model.config.rope, held.rope_tokens),
      sliding_(model.config.head_dim, model.config.sliding_rope, held.rope_tokens),
      tokens_(held.count),
      rope_tokens_(held.rope_tokens),
      at_once_(kHostTokensAtOnce),
      hooks_(std::move(hooks)) {
  const LlamaConfig& config = model.config;
  hidden_.resize(config.hidden_size);
  normed_.resize(config.hidden_size);
  qkv_.resize(config.q_width() + 2 * config.kv_width());
  attended_.resize(config.q_width());
  gate_up_.resize(2 * size_t{config.intermediate_size});
  update_.resize(config.hidden_size);
  logits_.resize(config.vocab_size);
}

std::span<const float> HostDecoder::prefill(std::span<const uint32_t> tokens,
                                            const PrefillProgress& progress) {
  logits_ = tools::prefill(
      model_, team_, tokens, [this](const LayerChunk& chunk) { cache_.prefill(chunk); }, progress,
      hooks_);
  const LlamaConfig& config = model_.config;
  full_ = Turn(config.head_dim, config.rope, tokens.size());
  sliding_ = Turn(config.head_dim, config.sliding_rope, tokens.size());
  tokens_ = static_cast<uint32_t>(tokens.size());
  rope_tokens_ = tokens.size();
  return logits_;
}

std::span<const float> HostDecoder::step(uint32_t token) {
  const LlamaConfig& config = model_.config;
  check_tokens(config, {&token, 1});
  Stopwatch stopwatch;
  math_.embed(model_.embedding, token, hidden_.data());
  full_.set(tokens_);
  if (config.full_layers() < config.layers) sliding_.set(tokens_);
  for (uint32_t layer = 0; layer < config.layers; ++layer) {
    const LayerWeights& weights = model_.layers[layer];
    const Turn& turn = config.slides(layer) ? sliding_ : full_;
    const float* q = qkv_.data();
    const float* k = q + config.q_width();
    const float* v = k + config.kv_width();
    math_.normalise(weights.attention_norm, hidden_.data(), normed_.data());
    multiply(weights.qkv, normed_.data(), team_, qkv_.data());
    math_.finish_qkv(weights, turn.rope, turn.cosines.data(), turn.sines.data(), qkv_.data());
    stopwatch.add_to(times_.projections);

    cache_.attend(layer, q, k, v, attended_.data());
    stopwatch.add_to(times_.attention);
    if (hook_ && !config.slides(layer)) {
      hook_(layer, q, attended_.data());
      stopwatch.skip();
    }

    multiply(weights.output, attended_.data(), team_, update_.data());
    math_.add_update(weights.output_bias, weights.output_norm, update_.data(), hidden_.data());
    stopwatch.add_to(times_.projections);

    math_.normalise(weights.mlp_norm, hidden_.data(), normed_.data());
    multiply(weights.gate_up, normed_.data(), team_, gate_up_.data());
    math_.activate(weights, gate_up_.data(), gate_up_.data());
    multiply(weights.down, gate_up_.data(), team_, update_.data());
    math_.add_update(weights.down_bias, weights.mlp_output_norm, update_.data(), hidden_.data());
    stopwatch.add_to(times_.mlp);
  }
  math_.normalise(model_.final_norm, hidden_.data(), normed_.data());
  multiply(model_.output_projection(), normed_.data(), team_, logits_.data());
  math_.finish_logits(logits_.data());
  stopwatch.add_to(times_.logits);
  ++times_.steps;
  ++tokens_;
  return logits_;
}

std::span<const float> HostDecoder::extend(std::span<const uint32_t> tokens) {
  if (tokens.size() < kFewestHostTokens || tokens_at_once() == 1) return Decoder::extend(tokens);
  logits_ = take_together(tokens, LogitsOf::last);
  return logits_;
}

void HostDecoder::extend_each(std::span<const uint32_t> tokens, std::vector<float>& logits) {
  if (tokens.size() == 1 || tokens_at_once() == 1) return Decoder::extend_each(tokens, logits);
  logits = take_together(tokens, LogitsOf::each);
}

std::vector<float> HostDecoder::take_together(std::span<const uint32_t> tokens, LogitsOf which) {
  if (tokens.size() > at_once_) {
    throw std::runtime_error(std::to_string(tokens.size()) +
                             " tokens at once; allowed: " + std::to_string(at_once_));
  }
  check_tokens(model_.config, tokens);
  const size_t end = tokens_ + tokens.size();
  check_rope_end(end, full_.rope.end());
  if (model_.config.full_layers() < model_.config.layers) check_rope_end(end, sliding_.rope.end());
  std::vector<float> logits;
  try {
    logits = host_extend(model_, cache_, team_, tokens, tokens_, full_.rope, sliding_.rope, which);
  } catch (...) {
    cache_.truncate(tokens_);  // some layers have them
    throw;
  }
  tokens_ += static_cast<uint32_t>(tokens.size());
  return logits;
}

size_t HostDecoder::tokens_at_once() const { return hook_ ? 1 : at_once_; }

size_t HostDecoder::worth_in_prefill(size_t tokens) const {
  if (tokens < kFewestHostTokens || tokens_at_once() == 1) return Decoder::worth_in_prefill(tokens);
  // The products are the same; but a layer's matrices are converted to fp32 for every 256 tokens, not once.
  return 2 * tokens;
}

void HostDecoder::truncate(uint32_t tokens) {
  cache_.truncate(tokens);
  tokens_ = std::min(tokens_, tokens);
}

bool HostDecoder::turns_otherwise(size_t tokens) const {
  return tools::turns_otherwise(model_.config, rope_tokens_, tokens);
}

std::span<const float> Decoder::extend(std::span<const uint32_t> tokens) {
  std::span<const float> logits;
  for (const uint32_t token : tokens) logits = step(token);
  return logits;
}

void Decoder::extend_each(std::span<const uint32_t> tokens, std::vector<float>& logits) {
  logits.clear();
  for (const uint32_t token : tokens) {
    const std::span<const float> row = step(token);
    logits.insert(logits.end(), row.begin(), row.end());
  }
}

uint32_t greedy(std::span<const float> logits) {
  return static_cast<uint32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

}  // namespace keyhole::tools

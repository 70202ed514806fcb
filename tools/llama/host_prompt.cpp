#include "tools/llama/host_prompt.h"

#include <cmath>

#include "tools/llama/engine_config.h"

namespace keyhole::tools {

PromptHandle make_prompt(const Engine& engine, const std::string& pattern) {
  keyhole_prompt* prompt = nullptr;
  check(keyhole_prompt_create(engine.get(), pattern.c_str(), &prompt));
  return PromptHandle(prompt);
}

keyhole_tensor host_rows(const float* data, size_t tokens, uint32_t heads, uint32_t dim,
                         size_t width) {
  keyhole_tensor t{};
  t.data = const_cast<float*>(data);
  t.dtype = KEYHOLE_F32;
  t.memory = KEYHOLE_HOST;
  t.rank = 3;
  t.shape[0] = static_cast<int64_t>(tokens), t.shape[1] = heads, t.shape[2] = dim;
  t.strides[0] = static_cast<int64_t>(width), t.strides[1] = dim, t.strides[2] = 1;
  return t;
}

PromptBlocks blocks_of(const PromptHandle& prompt) {
  PromptBlocks blocks;
  check(keyhole_prompt_get_blocks(prompt.get(), &blocks.attended, &blocks.seen));
  return blocks;
}

HostPrompt::HostPrompt(const LlamaConfig& model, const std::string& pattern, uint32_t threads)
    : q_heads_(model.q_heads), kv_heads_(model.kv_heads), head_dim_(model.head_dim) {
  keyhole_engine_config config = engine_config(model);
  const std::vector<keyhole_layer_config> layers = add_sliding_layers(model, config);
  config.device = KEYHOLE_DEVICE_HOST;
  config.threads = threads;
  const auto among_full = model.places_among_full();
  uint32_t sliding = model.full_layers();
  for (const auto& place : among_full) places_.push_back(place ? *place : sliding++);
  engine_ = make_engine(config);
  prompt_ = make_prompt(engine_, pattern);
}

void HostPrompt::attend(uint32_t layer, size_t n, size_t m, const float* q, const float* k,
                        const float* v, float* out) {
  const size_t q_width = size_t{q_heads_} * head_dim_, kv_width = size_t{kv_heads_} * head_dim_;
  const keyhole_tensor tq = host_rows(q, n, q_heads_, head_dim_, q_width),
                       tk = host_rows(k, m, kv_heads_, head_dim_, kv_width),
                       tv = host_rows(v, m, kv_heads_, head_dim_, kv_width),
                       to = host_rows(out, n, q_heads_, head_dim_, q_width);
  check(keyhole_prompt_attend(prompt_.get(), places_[layer], &tq, &tk, &tv, &to, nullptr, nullptr));
}

std::vector<double> row_errors(const float* out, const float* exact, size_t rows, uint32_t dim) {
  std::vector<double> errors(rows);
  for (size_t i = 0; i < rows; ++i) {
    double difference = 0, norm = 0;
    for (size_t j = i * dim; j < (i + 1) * dim; ++j) {
      const double x = double{out[j]} - double{exact[j]}, y = double{exact[j]};
      difference += x * x;
      norm += y * y;
    }
    errors[i] = difference == 0 ? 0.0 : std::sqrt(difference / norm);
  }
  return errors;
}

}  // namespace keyhole::tools

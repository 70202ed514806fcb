#include "tools/llama/cuda/prompt_attention.h"

#include "tools/llama/engine_config.h"
#include "tools/llama/gpu_model.h"

namespace keyhole::tools::cuda {
namespace {

keyhole_tensor tensor_of(const void* data, keyhole_dtype dtype, size_t tokens, uint32_t heads,
                         uint32_t dim) {
  keyhole_tensor t{};
  t.data = const_cast<void*>(data);
  t.dtype = dtype;
  t.memory = KEYHOLE_DEVICE;
  t.rank = 3;
  t.shape[0] = static_cast<int64_t>(tokens), t.shape[1] = heads, t.shape[2] = dim;
  t.strides[0] = int64_t{heads} * dim, t.strides[1] = dim, t.strides[2] = 1;
  return t;
}

}  // namespace

PromptAttention::PromptAttention(const LlamaConfig& model, const std::string& pattern,
                                 KvNumbers numbers)
    : q_heads_(model.q_heads),
      kv_heads_(model.kv_heads),
      head_dim_(model.head_dim),
      dtype_(numbers == KvNumbers::f32 ? KEYHOLE_F32 : KEYHOLE_F16) {
  keyhole_engine_config config = engine_config(model);
  const std::vector<keyhole_layer_config> layers = add_sliding_layers(model, config);
  config.device = KEYHOLE_DEVICE_CUDA;
  config.threads = 1;
  const auto among_full = model.places_among_full();
  uint32_t sliding = model.full_layers();
  for (const auto& place : among_full) places_.push_back(place ? *place : sliding++);
  engine_ = make_engine(config);
  keyhole_prompt* prompt = nullptr;
  check(keyhole_prompt_create(engine_.get(), pattern.c_str(), &prompt));
  prompt_.reset(prompt);
}

void PromptAttention::attend(uint32_t layer, size_t n, size_t m, const void* q, const void* k,
                             const void* v, void* out, keyhole_dtype out_dtype,
                             cudaStream_t stream) {
  const keyhole_tensor tq = tensor_of(q, dtype_, n, q_heads_, head_dim_),
                       tk = tensor_of(k, dtype_, m, kv_heads_, head_dim_),
                       tv = tensor_of(v, dtype_, m, kv_heads_, head_dim_),
                       to = tensor_of(out, out_dtype, n, q_heads_, head_dim_);
  check(keyhole_prompt_attend(prompt_.get(), places_[layer], &tq, &tk, &tv, &to, nullptr, stream));
}

double PromptAttention::share() const {
  uint64_t attended = 0, seen = 0;
  check(keyhole_prompt_get_blocks(prompt_.get(), &attended, &seen));
  return seen == 0 ? 1.0 : static_cast<double>(attended) / static_cast<double>(seen);
}

}  // namespace keyhole::tools::cuda

namespace keyhole::tools {

void check_prefill_pattern(const LlamaConfig& config, const std::string& pattern) {
  (void)cuda::PromptAttention(config, pattern);
}

}  // namespace keyhole::tools

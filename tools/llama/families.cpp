#include "tools/llama/families.h"

namespace keyhole::tools {
namespace {

// The defaults are those of the configuration classes of Hugging Face transformers 5.
constexpr Family kFamilies[] = {
    {.model_type = "llama", .may_have_attention_bias = true, .may_have_mlp_bias = true},
    {.model_type = "mistral",
     .sliding = Family::Sliding::every_layer,
     .kv_heads = 8,
     .max_context = 131072,
     .window = 4096},
    {.model_type = "qwen2",
     .qkv_bias = true,
     .sliding = Family::Sliding::from_max_layer,
     .max_context = 32768,
     .window = 4096},
    {.model_type = "qwen3",
     .may_have_attention_bias = true,
     .head_norms = true,
     .sliding = Family::Sliding::from_max_layer,
     .head_dim = 128,
     .max_context = 32768,
     .window = 4096},
    {.model_type = "gemma2",
     .may_have_attention_bias = true,
     .gemma = true,
     .may_have_attention_softcap = true,
     .activation_field = "hidden_activation",
     .activation = "gelu_pytorch_tanh",
     .sliding = Family::Sliding::pattern,
     .pattern = 2,
     .vocab_size = 256000,
     .q_heads = 8,
     .kv_heads = 4,
     .head_dim = 256,
     .max_context = 8192,
     .window = 4096,
     .final_softcap = 30.0,
     .tied_output = true},
    {.model_type = "gemma3_text",
     .may_have_attention_bias = true,
     .head_norms = true,
     .gemma = true,
     .activation_field = "hidden_activation",
     .activation = "gelu_pytorch_tanh",
     .sliding = Family::Sliding::pattern,
     .pattern = 6,
     .vocab_size = 262208,
     .q_heads = 8,
     .kv_heads = 4,
     .head_dim = 256,
     .max_context = 131072,
     .window = 4096,
     .theta = 1e6,
     .sliding_theta = 10000.0,
     .tied_output = true},
    {.model_type = "phi3",
     .fused_tensors = true,
     .partial_rope = true,
     .only_longrope = true,
     .sliding = Family::Sliding::every_layer,
     .max_context = 4096,
     .original_context = 4096,
     .rms_norm_eps = 1e-5},
};

}  // namespace

const Family* find_family(const std::string& model_type) {
  for (const Family& family : kFamilies) {
    if (model_type == family.model_type) return &family;
  }
  return nullptr;
}

std::string family_names() {
  std::string names;
  for (const Family& family : kFamilies) names += '"' + std::string(family.model_type) + "\", ";
  return names + "\"gemma3\"";
}

}  // namespace keyhole::tools

// Random models on disk, and an independent forward pass over them in double precision.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "runtime/files/json.h"
#include "runtime/files/safetensors.h"
#include "tests/temporary_folder.h"

namespace keyhole::tools::testing {

/// A tensor by Hugging Face's name, with values that the file's dtype can hold.
struct SyntheticTensor {
  std::vector<size_t> shape;
  std::vector<double> values;
};
using SyntheticTensors = std::map<std::string, SyntheticTensor>;

/// A small shape with every size different, so that swapped dimensions cannot go unseen.
[[nodiscard]] nlohmann::json small_config();
/// small_config() changed in one way: "tied", "multi_head", "one_kv_head", "wide_heads", "head_dim_80", "linear",
/// "llama3", "biases", "qwen3", "qwen3_sliding", "qwen3_all_sliding"; unchanged for other names.
[[nodiscard]] nlohmann::json config_variant(const std::string& name);

/// Random weights of the shape that `config` describes, rounded to `type`.
[[nodiscard]] SyntheticTensors random_weights(const nlohmann::json& config, ElementType type,
                                              uint64_t seed);

/// Writes tensors as one safetensors file.
void write_tensors(const std::filesystem::path& path, const SyntheticTensors& tensors,
                   ElementType type);
/// Writes config.json and the weights: one file, or `shards` files with their index.
void write_model(const std::filesystem::path& folder, const nlohmann::json& config,
                 const SyntheticTensors& tensors, ElementType type, size_t shards = 1);

/// Computes logits `[tokens][vocab]` of every position, token by token, head by head, in double. For model_type llama
/// and qwen3, with attention_bias and layer_types.
[[nodiscard]] std::vector<std::vector<double>> reference_logits(
    const nlohmann::json& config, const SyntheticTensors& tensors,
    const std::vector<uint32_t>& tokens);

/// RoPE's radians per token for pair i, from config.json's fields.
[[nodiscard]] double reference_frequency(const nlohmann::json& config, size_t pair);

}  // namespace keyhole::tools::testing

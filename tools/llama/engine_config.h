// What an engine of the library is told of a model.
#pragma once

#include <keyhole/layers.h>

#include <cstdint>
#include <vector>

#include "tools/llama/config.h"

namespace keyhole::tools {

/// Number of tokens behind a sliding window that are kept for truncate().
inline constexpr uint32_t kWindowSlack = 4096;

/// The dtype of a model's K and V: F32, F16 or BF16 as its config.json says, F16 where it says something else.
[[nodiscard]] keyhole_dtype kv_dtype_of(const LlamaConfig& model);

/// The engine's shape fields, kv_dtype, scale and soft-cap for a model, and RoPE where the library knows how to undo it
/// (not LongRoPE); everything else at its default. Its layers are those that attend to all tokens; of a
/// model that has none, one that stays empty.
[[nodiscard]] keyhole_engine_config engine_config(const LlamaConfig& model);

/// Adds the sliding layers to the config of engine_config(), behind the others, in the order of the model. Returns
/// the structs of all layers, to which the config then points.
[[nodiscard]] std::vector<keyhole_layer_config> add_sliding_layers(const LlamaConfig& model,
                                                                   keyhole_engine_config& config);

}  // namespace keyhole::tools

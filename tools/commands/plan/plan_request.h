// What is planned: the options of `keyhole plan`, and the shapes and limits that they mean.
#pragma once

#include <keyhole/keyhole.h>
#include <keyhole/layers.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tools/commands/plan/cards.h"
#include "tools/llama/gpu_sizes.h"

namespace keyhole::tools {

struct PlanOptions {
  std::string model;
  uint32_t layers = 0, heads = 0, kv_heads = 0, head_dim = 0;
  std::string dtype = "auto";
  std::string kv_host = "same";
  std::string exact_rows_by = "auto";
  std::string context;
  std::vector<std::string> indexes;
  std::string budgets;
  std::string weights, gpu_memory, host_memory, pinned_memory;
  uint32_t sink = 128, window = 512;
  uint32_t ranks = 1;
  std::string json;
  std::string card, active_weights;
  uint32_t exact_rows = 16;
};

/// Tokens of a block, by which a text is spread over ranks (keyhole/parallel.h).
inline constexpr uint64_t kBlockTokens = 4096;

/// Options as numbers.
struct PlanRequest {
  keyhole_engine_config engine;
  std::vector<keyhole_layer_config>
      layers;                ///< to which the engine points: of a model with sliding windows
  uint32_t full_layers = 0;  ///< that attend to all tokens
  uint64_t context = 0;      ///< of the rank that holds most
  uint64_t whole_context = 0;
  uint32_t ranks = 1;
  uint64_t weights = 0;
  uint64_t active_weights = 0;  ///< of these, what a token reads
  std::optional<uint64_t> gpu_memory, host_memory, pinned_memory;
  std::optional<Card> card;
  /// What the decoder takes for a prompt of all tokens on the GPU, where the shape is a model's.
  std::optional<GpuPrefillSizes> prompt;
};

/// Reads the options; those that are "auto" or belong to a model or a card are filled in. Throws UsageError.
[[nodiscard]] PlanRequest understand(PlanOptions& options);
/// Whether the card is known to have too few multiprocessors for lists of codes of this shape.
[[nodiscard]] bool lacks_lists(const PlanRequest& request);

}  // namespace keyhole::tools

#include "tools/commands/plan/plan_request.h"

#include <algorithm>
#include <filesystem>
#include <optional>
#include <string>

#include "tools/commands/common/context_warning.h"
#include "tools/commands/common/model_options.h"
#include "tools/commands/common/options.h"
#include "tools/commands/plan/speed.h"
#include "tools/llama/config.h"
#include "tools/llama/engine_config.h"
#include "tools/terminal/errors.h"
#include "tools/terminal/units.h"
#include "tools/terminal/warning.h"

namespace keyhole::tools {
namespace {

/// The largest share that a rank has of a text.
uint64_t largest_share(uint64_t tokens, uint64_t ranks) {
  const uint64_t round = kBlockTokens * ranks;
  return tokens / round * kBlockTokens + std::min(tokens % round, kBlockTokens);
}

LlamaConfig take_shape_of_model(PlanOptions& options) {
  check_model_folder(options.model);
  const LlamaConfig config =
      load_llama_config(std::filesystem::path(options.model) / "config.json");
  const auto set = [](uint32_t& option, uint32_t value) {
    if (option == 0) option = value;  // what is given on the command line goes first
  };
  if (config.full_layers() == 0 && options.layers == 0) {
    throw UsageError(
        "every layer of this model has a sliding window: a session would hold nothing");
  }
  set(options.layers, config.full_layers());
  set(options.heads, config.q_heads);
  set(options.kv_heads, config.kv_heads);
  set(options.head_dim, config.head_dim);
  if (options.dtype == "auto") options.dtype = dtype_name(kv_dtype_of(config));
  return config;
}

/// The card's memory is the limit where none is given, but for what CUDA and a display take of it.
Card take_card(PlanOptions& options) {
  constexpr uint64_t kOthers = uint64_t{1} << 30U;
  if (options.ranks > 1) throw UsageError("--card estimates one rank; --ranks is more");
  Card card = find_card(options.card);
  if (options.gpu_memory.empty()) {
    options.gpu_memory = std::to_string(card.memory - std::min(card.memory / 2, kOthers));
  }
  return card;
}

uint64_t active_weights_of(const PlanOptions& options, uint64_t weights) {
  if (options.active_weights.empty()) return weights;
  const uint64_t active = parse_bytes(options.active_weights);
  if (active == 0 || active > weights) {
    throw UsageError("--active-weights is " + format_bytes(active) +
                     ", allowed: from 1 B to --weights, " +
                     (weights == 0 ? "which is not given" : "which is " + format_bytes(weights)));
  }
  return active;
}

/// A session takes memory for the resident tokens that it may have, whether or not there are so many.
void warn_of_window(const PlanOptions& options, uint64_t context) {
  constexpr uint32_t kUsualWindow = 512;
  const uint64_t resident = uint64_t{options.sink} + options.window;
  if (options.window <= kUsualWindow || resident <= context) return;
  warn("--sink and --window hold " + format_count(resident) + " tokens, and the context is " +
       format_count(context) + ": a session takes memory for the whole window");
}

}  // namespace

PlanRequest understand(PlanOptions& options) {
  std::optional<LlamaConfig> model;
  if (!options.model.empty()) model = take_shape_of_model(options);
  if (options.dtype == "auto") options.dtype = "f16";
  const auto require = [](uint32_t value, const char* name) {
    if (value == 0)
      throw UsageError(std::string("give ") + name + ", or --model DIR to read the shape from");
  };
  require(options.layers, "--layers");
  require(options.heads, "--heads");
  require(options.kv_heads, "--kv-heads");
  require(options.head_dim, "--head-dim");

  PlanRequest request;
  if (!options.card.empty()) request.card = take_card(options);
  keyhole_engine_config& engine = request.engine;
  keyhole_engine_config_init(&engine);
  engine.layers = options.layers;
  engine.q_heads = options.heads;
  engine.kv_heads = options.kv_heads;
  engine.head_dim = options.head_dim;
  engine.kv_dtype = dtype_of(options.dtype);
  request.full_layers = engine.layers;
  // Their rings are memory, too; layers that the command line names are all full.
  const bool is_models_own =
      model && options.layers == model->full_layers() && options.heads == model->q_heads &&
      options.kv_heads == model->kv_heads && options.head_dim == model->head_dim;
  if (is_models_own && model->full_layers() < model->layers) {
    request.layers = add_sliding_layers(*model, engine);
  }
  request.whole_context = parse_tokens(options.context);
  constexpr uint64_t kMostTokens = uint64_t{1} << 31U;
  if (request.whole_context == 0 || request.whole_context > kMostTokens) {
    throw UsageError("--context is " + std::to_string(request.whole_context) +
                     " tokens, allowed: 1 to " + std::to_string(kMostTokens) +
                     ", on all ranks together");
  }
  request.ranks = options.ranks;
  request.context = largest_share(request.whole_context, request.ranks);
  warn_of_window(options, request.context);
  if (model) warn_of_context(*model, request.whole_context);
  if (is_models_own && request.whole_context != 0) {
    const size_t of_number = engine.kv_dtype == KEYHOLE_F32 ? 4 : 2;
    request.prompt = gpu_prefill_sizes(*model, request.whole_context, of_number, "dense");
  }
  if (!options.weights.empty()) request.weights = parse_bytes(options.weights);
  request.active_weights = active_weights_of(options, request.weights);
  if (!options.gpu_memory.empty()) request.gpu_memory = parse_bytes(options.gpu_memory);
  if (!options.host_memory.empty()) request.host_memory = parse_bytes(options.host_memory);
  if (!options.pinned_memory.empty()) request.pinned_memory = parse_bytes(options.pinned_memory);
  engine.device = request.gpu_memory ? KEYHOLE_DEVICE_CUDA : KEYHOLE_DEVICE_HOST;
  if (!request.gpu_memory) request.prompt.reset();
  if (request.card) {
    engine.device_capability =
        static_cast<uint32_t>(10 * request.card->compute_major + request.card->compute_minor);
  }
  return request;
}

bool lacks_lists(const PlanRequest& request) {
  if (!request.card) return false;
  CardLayer shape;
  shape.q_heads = request.engine.q_heads;
  shape.kv_heads = request.engine.kv_heads;
  shape.head_dim = request.engine.head_dim;
  return is_too_small_for_lists(*request.card, shape);
}

}  // namespace keyhole::tools

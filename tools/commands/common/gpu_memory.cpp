#include "tools/commands/common/gpu_memory.h"

#include <algorithm>

#include "runtime/files/json.h"
#include "tools/commands/common/options.h"
#include "tools/llama/gpu_sizes.h"
#include "tools/terminal/cli.h"
#include "tools/terminal/errors.h"
#include "tools/terminal/units.h"
#include "tools/terminal/warning.h"

namespace keyhole::tools {
namespace {

constexpr uint64_t kDriverBytes = uint64_t{512} << 20;
constexpr uint64_t kMostTokens = uint64_t{1} << 31;
constexpr const char* kFewestBits = "codes:k=2,v=2";

/// The session at `context` tokens, by the spec, with `device_limit` bytes.
keyhole_memory_plan plan_session(const GpuMemoryRequest& request, const AttendSpec& spec,
                                 const BudgetChoice& choice, uint64_t context,
                                 uint64_t device_limit) {
  keyhole_engine_config engine = engine_config(request.model);
  if (request.cache.kv_dtype != "auto") engine.kv_dtype = dtype_of(request.cache.kv_dtype);
  engine.device = KEYHOLE_DEVICE_CUDA;
  engine.threads = request.cache.threads;
  std::vector<keyhole_layer_config> layers;  // to which the config points
  if (request.model.full_layers() != request.model.layers) {
    layers = add_sliding_layers(request.model, engine);
  }
  keyhole_session_config session;
  keyhole_session_config_init(&session);
  session.sink = request.cache.sink;
  session.window = request.cache.window;
  session.kv_host = kv_host_of(request.cache.kv_host);
  session.dense_layers = request.cache.dense_layers.data();
  session.dense_layer_count = static_cast<uint32_t>(request.cache.dense_layers.size());
  if (!spec.budgets.empty()) session.budgets = spec.budgets.c_str();
  // A way that is no index leaves the session the one that it began with.
  const std::string index = spec.indexed() ? spec.text : kAutoIndex;
  session.index = index.c_str();
  if (spec.indexed()) session.budget = for_index(choice, index).budget();
  session.tail_partition = choice.tail.keys_per_partition;
  apply_settings(request.cache.settings, &session);
  keyhole_memory_plan plan;
  keyhole_memory_plan_init(&plan);
  const keyhole_status status = keyhole_plan(&engine, &session, context, device_limit, 0, &plan);
  if (status == KEYHOLE_INVALID_ARGUMENT) throw UsageError(keyhole_last_error());
  check(status);
  return plan;
}

/// The memory that does not depend on the session, for a prompt of `prompt` tokens.
GpuMemoryPlan plan_others(const GpuMemoryRequest& request, uint64_t weights, uint64_t prompt) {
  GpuMemoryPlan plan;
  plan.limit = request.limit;
  plan.driver = kDriverBytes;
  plan.weights = weights;
  plan.prefill =
      gpu_prefill_sizes(request.model, prompt, sizeof(float), request.prefill, request.chunk)
          .device_bytes();
  if (request.session) plan.prefill = std::max(plan.prefill, gpu_extension_bytes(request.model));
  if (request.session) plan.steps = gpu_step_bytes(request.model);
  plan.session_limit = plan.limit > plan.others() ? plan.limit - plan.others() : 0;
  return plan;
}

/// The plan of the largest session over all ways and budgets.
keyhole_memory_plan largest_session(const GpuMemoryRequest& request, uint64_t context,
                                    uint64_t device_limit, const AttendSpec** which = nullptr) {
  keyhole_memory_plan largest;
  keyhole_memory_plan_init(&largest);
  largest.fits = 1;
  for (const AttendSpec& spec : request.specs) {
    for (const BudgetChoice& choice : request.budgets) {
      if (choice.reads_codes() && !has_codes(spec.text)) continue;
      const keyhole_memory_plan plan = plan_session(request, spec, choice, context, device_limit);
      if (plan.device_bytes < largest.device_bytes) continue;
      largest = plan;
      if (which != nullptr) *which = &spec;
    }
  }
  return largest;
}

bool fits(const GpuMemoryRequest& request, uint64_t weights, uint64_t tokens) {
  const GpuMemoryPlan plan = plan_others(request, weights, tokens);
  if (plan.session_limit == 0) return false;
  return !request.session || largest_session(request, tokens, plan.session_limit).fits != 0;
}

/// The most tokens for which `is_enough`; 0 if not for one.
template <class Predicate>
uint64_t most_tokens(const Predicate& is_enough) {
  if (!is_enough(1)) return 0;
  uint64_t low = 1;
  uint64_t high = kMostTokens;
  while (high - low > 1) {
    const uint64_t middle = low + (high - low) / 2;
    (is_enough(middle) ? low : high) = middle;
  }
  return low;
}

/// Warns where some layers do not have their codes on the GPU, with the context and the bits with which all would.
void warn_of_layers(const GpuMemoryRequest& request, const GpuMemoryPlan& plan,
                    const keyhole_memory_plan& session, const AttendSpec& spec) {
  const std::string index = session.index;
  if (!spec.indexed() || !index.starts_with("codes")) return;
  const BudgetChoice& choice = request.budgets.front();
  const auto layers_at = [&](const std::string& text, uint64_t tokens, uint64_t limit) {
    return plan_session(request, {text, ""}, choice, tokens, limit).code_layers;
  };
  // The number of layers with all the memory that there could be.
  const uint32_t all = layers_at(index, request.context, uint64_t{1} << 62);
  if (session.code_layers >= all) return;
  std::string text = "codes of " + std::to_string(session.code_layers) + " of " +
                     std::to_string(all) + " layers fit within --gpu-memory " + request.option +
                     "; the host attends the others, which is slower. All would fit with ";
  if (index != kFewestBits && layers_at(kFewestBits, request.context, plan.session_limit) >= all) {
    text += std::string("--index ") + kFewestBits + ", or with ";
  }
  const uint64_t shorter = most_tokens([&](uint64_t tokens) {
    if (tokens >= request.context) return false;
    const GpuMemoryPlan others =
        plan_others(request, plan.weights, std::min(tokens, request.prompt));
    // A context that offloads nothing has no codes, and none are missing.
    return others.session_limit != 0 && layers_at(index, tokens, others.session_limit) >=
                                            layers_at(index, tokens, uint64_t{1} << 62);
  });
  warn(text + "a context of " + format_count(shorter) + " tokens");
}

}  // namespace

void add_gpu_memory_option(CLI::App& command, std::string& bytes) {
  command
      .add_option("--gpu-memory", bytes,
                  "Device memory for weights, prompt and session together, e.g. 24GiB: refused "
                  "before anything is loaded where it is too little [no limit]")
      ->type_name("BYTES");
}

GpuMemoryPlan plan_gpu_memory(const GpuMemoryRequest& request) {
  const uint64_t weights = gpu_weight_bytes(request.folder, request.model);
  GpuMemoryPlan plan = plan_others(request, weights, request.prompt);
  const std::string option = "--gpu-memory " + request.option + ": ";
  const auto refuse = [&](const std::string& needs) {
    const uint64_t longest =
        most_tokens([&](uint64_t tokens) { return fits(request, weights, tokens); });
    throw UsageError(option + needs +
                     (longest == 0 ? "; no context fits"
                                   : "; allowed: a context of at most " + format_count(longest) +
                                         " tokens, or more memory"));
  };
  const std::string parts = format_bytes(plan.weights) + " of weights, " +
                            format_bytes(plan.prefill) + " for a prompt of " +
                            format_count(request.prompt) + " tokens and " +
                            format_bytes(plan.driver + plan.steps) + " for CUDA and steps";
  if (plan.session_limit == 0) refuse(parts + " are " + format_bytes(plan.others()));
  if (!request.session) return plan;
  const AttendSpec* which = nullptr;
  const keyhole_memory_plan session =
      largest_session(request, request.context, plan.session_limit, &which);
  plan.session = session.device_bytes;
  if (session.fits == 0) {
    refuse(parts + " leave " + format_bytes(plan.session_limit) + ", and a session of " +
           format_count(request.context) + " tokens takes " + format_bytes(plan.session));
  }
  if (which != nullptr) warn_of_layers(request, plan, session, *which);
  return plan;
}

std::optional<GpuMemoryPlan> apply_gpu_memory(const ModelOptions& options, GpuMemoryRequest request,
                                              CacheFlags& cache) {
  if (options.gpu_memory.empty()) return std::nullopt;
  if (options.device == "host") {
    throw UsageError("--gpu-memory with --device host: allowed is one of them");
  }
  request.option = options.gpu_memory;
  request.limit = parse_bytes(options.gpu_memory);
  request.folder = model_folder(options);
  request.model = load_llama_config(request.folder / "config.json");
  request.prefill = options.prefill;
  request.chunk = options.chunk;
  request.cache = cache;
  set_kv_dtype(request.cache, request.model);
  request.session = request.session && cache.cache_device != "host";
  const GpuMemoryPlan plan = plan_gpu_memory(request);
  if (request.session) {
    cache.settings.push_back({&setting(kSessionSettings, "device_memory_limit"),
                              static_cast<double>(plan.session_limit)});
  }
  return plan;
}

std::string to_text(const GpuMemoryPlan& plan, uint64_t seen) {
  return "GPU memory: " + format_bytes(plan.weights) + " of weights, " +
         format_bytes(plan.prefill) + " for the prompt, " + format_bytes(plan.session) +
         " of session and " + format_bytes(plan.driver + plan.steps) + " for CUDA and steps of " +
         format_bytes(plan.limit) + "; at most " + format_bytes(seen) +
         " of the card were in use\n";
}

nlohmann::ordered_json to_json(const GpuMemoryPlan& plan, uint64_t seen) {
  return {{"limit", plan.limit},
          {"driver", plan.driver},
          {"weights", plan.weights},
          {"prefill", plan.prefill},
          {"steps", plan.steps},
          {"session", plan.session},
          {"session_limit", plan.session_limit},
          {"card_peak", seen}};
}

}  // namespace keyhole::tools

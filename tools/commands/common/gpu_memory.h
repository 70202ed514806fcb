// `--gpu-memory`: the memory that a model, its prompt and its session take on a GPU, added up before anything is
// loaded.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "tools/commands/common/attend_spec.h"
#include "tools/commands/common/cache_options.h"
#include "tools/commands/common/model_options.h"

namespace keyhole::tools {

void add_gpu_memory_option(CLI::App& command, std::string& bytes);

/// The input of a plan.
struct GpuMemoryRequest {
  LlamaConfig model;
  std::filesystem::path folder;   ///< of the model
  uint64_t limit = 0;             ///< bytes
  std::string option;             ///< as it was given, for messages
  uint64_t prompt = 0;            ///< tokens of the prefill
  std::string prefill = "dense";  ///< what its queries attend
  size_t chunk = 0;               ///< GpuModel::set_prefill_chunk()
  /// The session, if there is one on the GPU: its settings, the tokens that it holds in the end, and its ways to
  /// attend, of which the largest counts.
  bool session = false;
  CacheFlags cache;
  uint64_t context = 0;
  std::vector<AttendSpec> specs;
  std::vector<BudgetChoice> budgets;
};

/// The planned bytes of device memory.
struct GpuMemoryPlan {
  uint64_t limit = 0;
  uint64_t driver =
      0;  ///< an allowance for CUDA's context and modules, which no call tells beforehand
  uint64_t weights = 0;  ///< at most
  uint64_t prefill = 0;  ///< of the whole prompt; given back behind it
  uint64_t steps = 0;
  uint64_t session = 0;        ///< planned at the whole context
  uint64_t session_limit = 0;  ///< what all others leave: the session's device_memory_limit

  [[nodiscard]] uint64_t others() const { return driver + weights + prefill + steps; }
};

/// Plans. Throws UsageError where it does not fit, with what is too large and the longest context that would fit.
/// Warns (stderr) where only the codes of some layers fit, with the context and the bits with which all would.
[[nodiscard]] GpuMemoryPlan plan_gpu_memory(const GpuMemoryRequest& request);

/// Plans for --gpu-memory, and puts the session's limit into `cache`; returns nothing without the option. `request`
/// lacks only what the model options say. Throws UsageError also where the model was asked to run on the host.
[[nodiscard]] std::optional<GpuMemoryPlan> apply_gpu_memory(const ModelOptions& options,
                                                            GpuMemoryRequest request,
                                                            CacheFlags& cache);

/// The plan as text: "GPU memory: 15 GiB of weights, ... of 24 GiB; at most 22 GiB of the card were in use". seen:
/// GpuModel::memory_peak().
[[nodiscard]] std::string to_text(const GpuMemoryPlan& plan, uint64_t seen);
[[nodiscard]] nlohmann::ordered_json to_json(const GpuMemoryPlan& plan, uint64_t seen);

}  // namespace keyhole::tools

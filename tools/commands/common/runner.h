// The device that a model runs on, `--device`, and decoders on that device.
#pragma once

#include <keyhole/keyhole.h>

#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "tools/commands/common/cli_fwd.h"
#include "tools/llama/decoder.h"
#include "tools/llama/gpu_model.h"
#include "tools/llama/host_prompt.h"
#include "tools/llama/keyhole_cache.h"
#include "tools/llama/team.h"

namespace keyhole::tools {

/// Adds `--device auto|host|cuda`.
void add_device_option(CLI::App& command, std::string& device);

/// Adds `--prefill`, which sets ModelOptions::prefill.
void add_prefill_option(CLI::App& command, std::string& pattern);
/// Adds `--chunk`, see PrefillChoice.
void add_chunk_option(CLI::App& command, uint32_t& chunk);

/// Adds `--products`, which sets ModelOptions::products.
void add_products_option(CLI::App& command, std::string& products);

/// The pattern that the library chooses, by the device that the model runs on.
inline constexpr const char* kAutoPrefill = "auto";
/// How prompts of more than 4096 tokens are attended: a pattern of keyhole_prompt_create(), and whether dense
/// attention is computed beside it to compare.
struct PrefillChoice {
  std::string pattern = "dense";
  bool check = false;
  /// The most queries of one call of the library, which chooses by these queries alone, as for a prompt that comes in
  /// chunks. On the host, dense attention of prompts of any length is then the library's, too. 0: 8192 on the host,
  /// on a GPU by its memory.
  size_t chunk = 0;
  /// "auto", "bf16" or "exact": PromptProducts, of a model on a GPU; the host computes in fp32.
  std::string products = "auto";
};

/// A model on the device that was asked for. auto: the GPU where the machine has one that can run it.
class Runner {
 public:
  /// Brings the weights to the device, with a progress bar and Ctrl-C. `threads`: of the host. Throws
  /// std::runtime_error where the GPU was asked for and cannot run the model, and where prefill
  /// (keyhole_prompt_create()) is no pattern.
  Runner(LlamaModel model, const std::string& device, uint32_t threads,
         const PrefillChoice& prefill = {});

  [[nodiscard]] const LlamaModel& model() const { return model_; }
  [[nodiscard]] bool on_gpu() const { return gpu_ != nullptr; }
  /// The seconds that the constructor took to bring the weights; the files were opened and checked before.
  [[nodiscard]] double load_seconds() const { return load_seconds_; }
  /// The device for people: "NVIDIA H200", or "host".
  [[nodiscard]] std::string device() const;
  /// GpuModel::memory_peak(); 0 on the host.
  [[nodiscard]] uint64_t gpu_memory_peak() const { return on_gpu() ? gpu_->memory_peak() : 0; }
  /// The pattern in effect, as GpuModel has it, on the host as well.
  [[nodiscard]] std::string prefill_pattern() const {
    return on_gpu() ? gpu_->prefill_pattern() : host_prefill_.pattern;
  }
  [[nodiscard]] size_t prefill_chunk() const {
    return on_gpu() ? gpu_->prefill_chunk() : host_prefill_.chunk;
  }
  [[nodiscard]] std::vector<GpuModel::PrefillErrors> prefill_errors() const {
    return on_gpu() ? gpu_->prefill_errors() : host_errors_;
  }
  [[nodiscard]] double prefill_share() const {
    if (on_gpu()) return gpu_->prefill_share();
    return host_prompt_ ? host_prompt_->blocks().share() : 1.0;
  }
  /// The device on which a session beside the model keeps sink and window; `choice` is that of --cache-device.
  [[nodiscard]] keyhole_device session_device(const std::string& choice) const;

  /// Makes a decoder for `cache`, which holds `held`. The cache and the runner outlive it.
  [[nodiscard]] std::unique_ptr<Decoder> decoder(KeyholeCache& cache, HeldTokens held = {});
  /// Prefills, see prefill.h. times: those of the host, or of the GPU by its clock.
  std::vector<float> prefill(std::span<const uint32_t> tokens, const LayerSink& sink,
                             const PrefillProgress& progress, PrefillTimes* times = nullptr);
  /// Changes how prompts come. Throws LibraryError, and then keeps the former choice.
  void set_prefill(const PrefillChoice& prefill);

 private:
  /// The hooks of prompts on the host.
  [[nodiscard]] PrefillHooks host_hooks(PrefillTimes* times = nullptr);
  void attend_on_host(uint32_t layer, size_t first, size_t tokens, float* q, const float* k,
                      const float* v);

  const LlamaModel model_;
  std::unique_ptr<GpuModel> gpu_;
  Team team_;
  double load_seconds_ = 0.0;
  // Members of a model on the host:
  PrefillChoice host_prefill_;
  std::unique_ptr<HostPrompt> host_prompt_;  ///< null: dense
  std::unique_ptr<HostPrompt> host_truth_;   ///< null: nothing is compared
  std::vector<GpuModel::PrefillErrors> host_errors_;
  std::vector<double> layer_errors_;  ///< of the chunks of a layer so far
};

/// The pattern and its share as text behind a prompt's: ", sampled:mass=950 (12 % of the blocks)"; empty where all
/// was attended.
[[nodiscard]] std::string prefill_text(const Runner& runner);
/// A table of the errors that a checked prompt has shown, empty without; below, as JSON.
[[nodiscard]] std::string prefill_errors_text(const Runner& runner);
[[nodiscard]] nlohmann::ordered_json prefill_errors_json(const Runner& runner);

}  // namespace keyhole::tools

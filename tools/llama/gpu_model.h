// A Llama's weights on a GPU, and running prompts there. No CUDA in this header. Where the build or the machine has
// none, gpu_refusal() says so and the constructor throws the same.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tools/llama/kv_share.h"
#include "tools/llama/prefill.h"
#include "tools/llama/read_ahead.h"
#include "tools/llama/weights.h"

namespace keyhole::tools {

/// Why this model cannot run on this machine's GPU, for people; empty if it can.
[[nodiscard]] std::string gpu_refusal(const LlamaConfig& config);

/// Throws LibraryError where the library takes no such pattern for prompts of the model.
void check_prefill_pattern(const LlamaConfig& config, const std::string& pattern);

/// How the products of a prompt's tokens, and of those of a turn, with the weights are formed. exact: activations are
/// sums of two bf16, a product each (cuda/split.h). bf16: activations are rounded to bf16, which saves one of
/// these products, and so are gate and up of bf16 weights before they are multiplied. automatic: as bf16 in a context
/// of more than kFineTokens (gpu_sizes.h) of a model whose matrices all are bf16 and that does not ask for float32,
/// which is how such models are run; else exact.
enum class PromptProducts { automatic, bf16, exact };

/// The weights, as bf16 where that loses nothing, else as sums of two bf16. Immutable: several decoders may share
/// one.
class GpuModel {
 public:
  /// Borrows the model. Throws std::runtime_error: gpu_refusal(), or what CUDA says (no memory).
  explicit GpuModel(const LlamaModel& model, const LoadProgress& progress = {});
  ~GpuModel();
  GpuModel(const GpuModel&) = delete;
  GpuModel& operator=(const GpuModel&) = delete;

  [[nodiscard]] const LlamaModel& host() const { return model_; }
  /// The name of the GPU, e.g. "NVIDIA H200".
  [[nodiscard]] const std::string& device_name() const { return device_name_; }

  /// Takes note of how much of the card's memory is in use, by this program and others. Any thread.
  void note_memory() const noexcept;
  /// The most bytes that were noted: after loading, at each layer of a prompt, and at one step of 64.
  [[nodiscard]] uint64_t memory_peak() const { return memory_peak_; }

  /// Sets which keys the queries of prompts of more than 4096 tokens attend, as keyhole_prompt_create() takes it;
  /// "dense" at first. Call it before prompts.
  void set_prefill_pattern(std::string pattern) { prefill_pattern_ = std::move(pattern); }
  [[nodiscard]] const std::string& prefill_pattern() const { return prefill_pattern_; }
  /// Sets how many tokens have their activations in memory at once; their queries together choose what they attend.
  /// 0, as at first: as many as 1 GiB has room for, 8192 at most.
  void set_prefill_chunk(size_t chunk) { prefill_chunk_ = chunk; }
  [[nodiscard]] size_t prefill_chunk() const { return prefill_chunk_; }
  /// Sets how products of many tokens are formed; automatic at first. Call it before prompts.
  void set_products(PromptProducts products) { products_ = products; }
  /// Whether products of tokens that end a context of so many tokens take activations rounded to bf16.
  [[nodiscard]] bool rounds_activations(size_t context) const;
  /// Notes the share of the blocks seen by the queries of the last prompt that they attended. Any thread.
  void note_prefill_share(double share) const noexcept { prefill_share_ = share; }
  [[nodiscard]] double prefill_share() const { return prefill_share_; }

  /// The relative errors of a layer's outputs, by token and query head, against dense attention to the same q, k and
  /// v.
  struct PrefillErrors {
    uint32_t layer = 0;
    double median = 0.0, p95 = 0.0;
  };
  /// Makes prompts compute their attention a second time, densely, to compare. Off at first. Call it before prompts.
  void check_prefill(bool checks = true) { checks_prefill_ = checks; }
  [[nodiscard]] bool checks_prefill() const { return checks_prefill_; }
  void note_prefill_errors(std::vector<PrefillErrors> errors) const {
    prefill_errors_ = std::move(errors);
  }
  [[nodiscard]] const std::vector<PrefillErrors>& prefill_errors() const { return prefill_errors_; }

  struct Device;
  [[nodiscard]] const Device& device() const { return *device_; }

 private:
  const LlamaModel& model_;
  std::string device_name_;
  std::unique_ptr<Device> device_;
  mutable std::atomic<uint64_t> memory_peak_ = 0;
  std::string prefill_pattern_ = "dense";
  size_t prefill_chunk_ = 0;
  PromptProducts products_ = PromptProducts::automatic;
  mutable std::atomic<double> prefill_share_ = 1.0;
  bool checks_prefill_ = false;
  mutable std::vector<PrefillErrors> prefill_errors_;
};

/// The receiver of q, K and V of a prompt in device memory.
struct DeviceSink {
  ElementType type = ElementType::f32;  ///< that k and v are wanted in: f32, f16 or bf16
  /// Called like a LayerSink. The chunk is complete, and may change as soon as the call returns. k and v of layers that
  /// attend to all tokens have been copied to the host while the GPU went on, as a cache keeps them there.
  std::function<void(const DeviceLayerChunk&)> take;
  KvShare share = {};           ///< what is to be copied to the host
  uint64_t* brought = nullptr;  ///< counts the bytes that were; null: not wanted
};

/// Computes prefill() of prefill.h on the GPU: the same logits up to rounding (attention in fp16 with fp32 sums,
/// products as PromptProducts says), and the same hand-over to `sink`, while the GPU goes on. times: written, by the
/// GPU's clock, for the hand-over by the host's; null: not wanted.
///
/// Hidden states of all tokens, RoPE's table and one layer's K and V (fp16) lie on the card, beside the activations
/// of a chunk of tokens: of 128k tokens of a model with 384 hidden and 2 KV heads of 128 elements, 0.8 GB.
[[nodiscard]] std::vector<float> gpu_prefill(const GpuModel& model,
                                             std::span<const uint32_t> tokens,
                                             const LayerSink& sink,
                                             const PrefillProgress& progress = {},
                                             PrefillTimes* times = nullptr);
/// gpu_prefill() for a sink on the GPU: it takes a third to a half of the bytes, and they leave the card at most
/// once.
[[nodiscard]] std::vector<float> gpu_prefill_to_device(const GpuModel& model,
                                                       std::span<const uint32_t> tokens,
                                                       const DeviceSink& sink,
                                                       const PrefillProgress& progress = {});

}  // namespace keyhole::tools

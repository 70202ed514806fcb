#include "tools/commands/common/runner.h"

#include <CLI/CLI.hpp>

#include "tools/llama/gpu_decoder.h"
#include "tools/llama/host_decoder.h"

namespace keyhole::tools {

void add_device_option(CLI::App& command, std::string& device) {
  command
      .add_option("--device", device,
                  "Where the model runs: host, cuda, or auto: the GPU where there is one")
      ->check(CLI::IsMember({"auto", "host", "cuda"}))
      ->capture_default_str();
}

Runner::Runner(LlamaModel model, const std::string& device, uint32_t threads)
    : model_(std::move(model)), team_(threads) {
  if (device == "host") return;
  const std::string refusal = gpu_refusal(model_.config);
  if (refusal.empty()) {
    gpu_ = std::make_unique<GpuModel>(model_);
  } else if (device == "cuda") {
    throw std::runtime_error("--device cuda: " + refusal);
  }
}

std::string Runner::device() const { return on_gpu() ? gpu_->device_name() : "host"; }

keyhole_device Runner::session_device(const std::string& choice) const {
  return choice == "cuda" || (choice == "auto" && on_gpu()) ? KEYHOLE_DEVICE_CUDA
                                                            : KEYHOLE_DEVICE_HOST;
}

std::unique_ptr<Decoder> Runner::decoder(KeyholeCache& cache, uint32_t tokens) {
  if (on_gpu()) return std::make_unique<GpuDecoder>(*gpu_, cache, tokens);
  return std::make_unique<HostDecoder>(model_, cache, team_, tokens);
}

std::vector<float> Runner::prefill(std::span<const uint32_t> tokens, const LayerSink& sink,
                                   const PrefillProgress& progress) {
  if (on_gpu()) return gpu_prefill(*gpu_, tokens, sink, progress);
  return tools::prefill(model_, team_, tokens, sink, progress);
}

}  // namespace keyhole::tools

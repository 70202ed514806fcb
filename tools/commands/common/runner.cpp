#include "tools/commands/common/runner.h"

#include <CLI/CLI.hpp>
#include <algorithm>

#include "tools/llama/gpu_decoder.h"
#include "tools/llama/host_decoder.h"
#include "tools/llama/read_ahead.h"
#include "tools/terminal/clock.h"
#include "tools/terminal/interrupt.h"
#include "tools/terminal/progress.h"
#include "tools/terminal/units.h"

namespace keyhole::tools {

void add_device_option(CLI::App& command, std::string& device) {
  command
      .add_option("--device", device,
                  "Where the model runs: host, cuda, or auto: the GPU where there is one")
      ->check(CLI::IsMember({"auto", "host", "cuda"}))
      ->capture_default_str();
}

namespace {

/// "loading 3.1 GiB of 15 GiB, 2.4 GiB/s".
std::string loading_title(uint64_t done, uint64_t total, double seconds) {
  std::string title = "loading " + format_bytes(done) + " of " + format_bytes(total);
  if (seconds > 0.0) {
    title += ", " + format_bytes(static_cast<uint64_t>(static_cast<double>(done) / seconds)) + "/s";
  }
  return title;
}

}  // namespace

Runner::Runner(LlamaModel model, const std::string& device, uint32_t threads)
    : model_(std::move(model)), team_(threads) {
  const std::string refusal = device == "host" ? "" : gpu_refusal(model_.config);
  if (device == "cuda" && !refusal.empty()) {
    throw std::runtime_error("--device cuda: " + refusal);
  }
  const Clock::time_point start = Clock::now();
  Progress bar("loading");
  const LoadProgress progress = [&](uint64_t done, uint64_t total) {
    throw_if_interrupted();
    bar.update(static_cast<double>(done) / static_cast<double>(std::max<uint64_t>(total, 1)),
               loading_title(done, total, seconds_since(start)));
  };
  if (device != "host" && refusal.empty()) {
    gpu_ = std::make_unique<GpuModel>(model_, progress);
  } else {
    read_ahead(model_, team_, progress);
  }
  load_seconds_ = seconds_since(start);
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

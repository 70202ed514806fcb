#include "tools/commands/common/runner.h"

#include <keyhole/prefill.h>

#include <algorithm>

#include "runtime/files/json.h"
#include "tools/commands/common/quantile.h"
#include "tools/llama/gpu_decoder.h"
#include "tools/llama/gpu_sizes.h"
#include "tools/llama/host_decoder.h"
#include "tools/llama/read_ahead.h"
#include "tools/terminal/cli.h"
#include "tools/terminal/clock.h"
#include "tools/terminal/interrupt.h"
#include "tools/terminal/progress.h"
#include "tools/terminal/style.h"
#include "tools/terminal/table.h"
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

// Queries that the host attends in one call, whole tiles of 128: a minute at 1M tokens of an 8B shape.
constexpr size_t kHostChunk = 8192;

/// "loading 3.1 GiB of 15 GiB, 2.4 GiB/s".
std::string loading_title(uint64_t done, uint64_t total, double seconds) {
  std::string title = "loading " + format_bytes(done) + " of " + format_bytes(total);
  if (seconds > 0.0) {
    title += ", " + format_bytes(static_cast<uint64_t>(static_cast<double>(done) / seconds)) + "/s";
  }
  return title;
}

PromptProducts products_of(const std::string& word) {
  if (word == "auto") return PromptProducts::automatic;
  return word == "bf16" ? PromptProducts::bf16 : PromptProducts::exact;
}

}  // namespace

void add_prefill_option(CLI::App& command, std::string& pattern) {
  command
      .add_option(
          "--prefill", pattern,
          "What the queries of a prompt of more than 4096 tokens attend: dense (everything), "
          "auto, budgets (as --budgets FILE says), or one of\n" +
              std::string(keyhole_prompt_help()))
      ->type_name("PATTERN")
      ->capture_default_str();
}

void add_chunk_option(CLI::App& command, uint32_t& chunk) {
  constexpr uint32_t kMost = 1U << 24;
  command
      .add_option("--chunk", chunk,
                  "Tokens of a prompt whose queries attend, and choose what they attend, at once; "
                  "default: 8192 on the host, on a GPU as many as its memory has room for")
      ->check(CLI::Range(1U, kMost));
}

void add_products_option(CLI::App& command, std::string& products) {
  command
      .add_option(
          "--products", products,
          "On a GPU, products of a prompt's activations with the weights: bf16 (activations are "
          "rounded, as models are usually run), exact (activations as sums of two bf16: twice the "
          "products), or auto: bf16 from 4097 tokens on where all weights are bf16, else exact")
      ->type_name("HOW")
      ->check(CLI::IsMember({"auto", "bf16", "exact"}))
      ->capture_default_str();
}

Runner::Runner(LlamaModel model, const std::string& device, uint32_t threads,
               const PrefillChoice& prefill)
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
    check_prefill_pattern(model_.config, prefill.pattern);
    gpu_ = std::make_unique<GpuModel>(model_, progress);
    set_prefill(prefill);
  } else {
    set_prefill(prefill);
    read_ahead(model_, team_, progress);
  }
  load_seconds_ = seconds_since(start);
}

std::string Runner::device() const { return on_gpu() ? gpu_->device_name() : "host"; }

keyhole_device Runner::session_device(const std::string& choice) const {
  return choice == "cuda" || (choice == "auto" && on_gpu()) ? KEYHOLE_DEVICE_CUDA
                                                            : KEYHOLE_DEVICE_HOST;
}

std::string prefill_text(const Runner& runner) {
  const std::string pattern = runner.prefill_pattern();
  const bool is_auto = pattern == kAutoPrefill;  // exact, or `sampled`
  if (pattern == "dense" || (is_auto && runner.prefill_share() == 1.0)) return "";
  constexpr double kPercent = 100.0;
  return ", by the pattern " + (is_auto ? "sampled" : pattern) + " (" +
         format_number(kPercent * runner.prefill_share()) + " % of the blocks)";
}

std::string prefill_errors_text(const Runner& runner) {
  const auto errors = runner.prefill_errors();
  if (errors.empty()) return "";
  Table table({{"layer", Table::Align::right},
               {"error p50", Table::Align::right},
               {"error p95", Table::Align::right}});
  for (const GpuModel::PrefillErrors& e : errors) {
    table.add_row({std::to_string(e.layer), format_number(e.median), format_number(e.p95)});
  }
  return "\n" + table.text(style_of(stdout)) +
         "error: of the prompt's attention, by token and query head, beside dense attention to the "
         "same q, k and v; of the "
         "last layer that of the last token alone\n";
}

nlohmann::ordered_json prefill_errors_json(const Runner& runner) {
  nlohmann::ordered_json all = nlohmann::ordered_json::array();
  for (const GpuModel::PrefillErrors& e : runner.prefill_errors()) {
    all.push_back({{"layer", e.layer}, {"p50", e.median}, {"p95", e.p95}});
  }
  return all;
}

std::unique_ptr<Decoder> Runner::decoder(KeyholeCache& cache, HeldTokens held) {
  if (on_gpu()) return std::make_unique<GpuDecoder>(*gpu_, cache, held);
  return std::make_unique<HostDecoder>(model_, cache, team_, held, host_hooks());
}

std::vector<float> Runner::prefill(std::span<const uint32_t> tokens, const LayerSink& sink,
                                   const PrefillProgress& progress, PrefillTimes* times) {
  if (on_gpu()) return gpu_prefill(*gpu_, tokens, sink, progress, times);
  return tools::prefill(model_, team_, tokens, sink, progress, host_hooks(times));
}

void Runner::set_prefill(const PrefillChoice& prefill) {
  if (on_gpu()) {
    check_prefill_pattern(model_.config, prefill.pattern);
    gpu_->set_prefill_pattern(prefill.pattern);
    gpu_->check_prefill(prefill.check);
    gpu_->set_prefill_chunk(prefill.chunk);
    gpu_->set_products(products_of(prefill.products));
    return;
  }
  std::unique_ptr<HostPrompt> prompt, truth;
  if (prefill.pattern != "dense" || prefill.chunk != 0) {
    prompt = std::make_unique<HostPrompt>(model_.config, prefill.pattern, team_.size());
    if (prefill.check) {
      truth = std::make_unique<HostPrompt>(model_.config, "dense", team_.size());
    }
  }
  host_prefill_ = prefill;
  host_prompt_ = std::move(prompt);
  host_truth_ = std::move(truth);
  host_errors_.clear();
}

PrefillHooks Runner::host_hooks(PrefillTimes* times) {
  if (!host_prompt_) return {{}, 0, 0, times};
  // Between two calls there is progress, and Ctrl-C.
  const size_t chunk = host_prefill_.chunk != 0 ? host_prefill_.chunk : kHostChunk;
  const size_t beyond = host_prefill_.pattern == "dense" ? 0 : kFineTokens;
  return {[this](uint32_t layer, size_t first, size_t tokens, float* q, const float* k,
                 const float* v) { attend_on_host(layer, first, tokens, q, k, v); },
          beyond, chunk, times};
}

void Runner::attend_on_host(uint32_t layer, size_t first, size_t tokens, float* q, const float* k,
                            const float* v) {
  throw_if_interrupted();
  const size_t n = tokens - first;
  if (!host_truth_) return host_prompt_->attend(layer, n, tokens, q, k, v, q);
  std::vector<float> exact(n * model_.config.q_width());
  host_truth_->attend(layer, n, tokens, q, k, v, exact.data());
  host_prompt_->attend(layer, n, tokens, q, k, v, q);
  const uint32_t d = model_.config.head_dim;
  const std::vector<double> errors = row_errors(q, exact.data(), n * model_.config.q_heads, d);
  if (first == 0) layer_errors_.clear();
  layer_errors_.insert(layer_errors_.end(), errors.begin(), errors.end());
  std::sort(layer_errors_.begin(), layer_errors_.end());
  if (first != 0) host_errors_.pop_back();
  if (!host_errors_.empty() && host_errors_.back().layer >= layer) host_errors_.clear();
  host_errors_.push_back(
      {layer, nearest_rank(layer_errors_, 0.5), nearest_rank(layer_errors_, 0.95)});
}

}  // namespace keyhole::tools

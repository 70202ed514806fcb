#include "tools/commands/calibrate/prefill.h"

#include <algorithm>

#include "tools/commands/common/recording.h"
#include "tools/llama/gpu_model.h"
#include "tools/llama/keyhole_cache.h"
#include "tools/llama/prefill.h"
#include "tools/terminal/errors.h"
#include "tools/terminal/interrupt.h"
#include "tools/terminal/progress.h"
#include "tools/terminal/table.h"
#include "tools/terminal/units.h"

namespace keyhole::tools {
namespace {

/// Prompts as tokens: of the task, or of kv and of prose.
std::vector<std::vector<uint32_t>> prompts_of(const PrefillPlan& plan) {
  RecordOptions record;
  record.model = plan.model;
  record.task = plan.task;
  if (!plan.task.task.empty()) return {prompt_tokens(record)};
  record.task.task = "kv";
  const std::unique_ptr<const Tokenizer> tokenizer = load_tokenizer(plan.model);
  std::vector<uint32_t> prose = tokenizer->encode_prompt(haystack_of(plan.task));
  prose.resize(std::min<size_t>(prose.size(), length_of(plan.task)));
  return {prompt_tokens(record), prose};
}

/// The figures of every query head of one prompt, `[heads of the wanted layers]`.
class PromptSearch {
 public:
  PromptSearch(const LlamaModel& model, const PrefillPlan& plan)
      : model_(model),
        plan_(plan),
        places_(model.config.places_among_full()),
        team_(plan.threads),
        gpu_(on_gpu(plan.model.device, model.config) ? std::make_unique<GpuModel>(model) : nullptr),
        search_(model.config.head_dim, static_cast<float>(model.config.attention_scale),
                static_cast<float>(model.config.attention_softcap), plan.patterns, plan.requirement,
                team_.size(), gpu_ != nullptr) {
    if (gpu_ == nullptr) {
      dense_ = std::make_unique<HostPrompt>(model.config, "dense", team_.size());
    }
    for (uint32_t layer = 0; layer + 1 < model.config.layers; ++layer) {
      if (places_[layer] && is_wanted(*places_[layer])) wanted_.push_back(layer);
    }
    if (wanted_.empty()) {
      throw UsageError(
          "--layers names none that prompts attend by patterns: these are neither the last layer "
          "nor "
          "those with a sliding window");
    }
  }
  /// (layer, query head) by the numbers of a file of budgets.
  [[nodiscard]] std::vector<std::pair<uint32_t, uint32_t>> heads() const {
    std::vector<std::pair<uint32_t, uint32_t>> all;
    for (const uint32_t layer : wanted_) {
      for (uint32_t h = 0; h < model_.config.q_heads; ++h) all.emplace_back(*places_[layer], h);
    }
    return all;
  }

  std::vector<std::vector<PatternFigures>> run(const std::vector<uint32_t>& tokens, size_t number) {
    figures_.clear();
    Progress bar("calibrating");
    const double heads = static_cast<double>(wanted_.size()) * model_.config.q_heads;
    const auto tell = [&](uint32_t layer) {
      throw_if_interrupted();
      bar.update(static_cast<double>(figures_.size()) / heads,
                 "prompt " + std::to_string(number + 1) + ", layer " + std::to_string(layer));
    };
    if (gpu_ != nullptr) {
      (void)gpu_prefill(
          *gpu_, tokens, [&](const LayerChunk& chunk) { gather(chunk, tokens.size(), tell); },
          [](double) { throw_if_interrupted(); });
      return std::move(figures_);
    }
    PrefillHooks hooks;
    hooks.attend = [&](uint32_t layer, size_t first, size_t count, float* q, const float* k,
                       const float* v) {
      if (is_wanted_layer(layer)) measure_layer(layer, q, k, v, count, tell);
      dense_->attend(layer, count - first, count, q, k, v, q);
    };
    (void)prefill(
        model_, team_, tokens, {}, [](double) { throw_if_interrupted(); }, hooks);
    return std::move(figures_);
  }

 private:
  /// Whether the model runs on a GPU. Throws std::runtime_error where that was asked for and cannot be.
  static bool on_gpu(const std::string& device, const LlamaConfig& config) {
    if (device == "host") return false;
    const std::string refusal = gpu_refusal(config);
    if (device == "cuda" && !refusal.empty()) throw std::runtime_error("--device cuda: " + refusal);
    return refusal.empty();
  }
  /// A layer's q, k and v come in chunks; with the last of them its heads are measured.
  template <class Tell>
  void gather(const LayerChunk& chunk, size_t tokens, const Tell& tell) {
    if (!is_wanted_layer(chunk.layer)) return;
    const size_t q_width = model_.config.q_width(), kv_width = model_.config.kv_width();
    const auto add = [&](std::vector<float>& rows, const float* from, size_t width) {
      rows.resize(tokens * width);
      std::copy_n(from, chunk.tokens * width,
                  rows.begin() + static_cast<ptrdiff_t>(chunk.first_token * width));
    };
    add(q_, chunk.q, q_width);
    add(k_, chunk.k, kv_width);
    add(v_, chunk.v, kv_width);
    if (chunk.first_token + chunk.tokens < tokens) return;
    measure_layer(chunk.layer, q_.data(), k_.data(), v_.data(), tokens, tell);
  }
  [[nodiscard]] bool is_wanted(uint32_t place) const {
    return plan_.layers.empty() ||
           std::find(plan_.layers.begin(), plan_.layers.end(), place) != plan_.layers.end();
  }
  [[nodiscard]] bool is_wanted_layer(uint32_t layer) const {
    return std::find(wanted_.begin(), wanted_.end(), layer) != wanted_.end();
  }
  template <class Tell>
  void measure_layer(uint32_t layer, const float* q, const float* k, const float* v, size_t tokens,
                     const Tell& tell) {
    const LlamaConfig& config = model_.config;
    for (uint32_t h = 0; h < config.q_heads; ++h) {
      tell(layer);
      const size_t d = config.head_dim, kv = h / (config.q_heads / config.kv_heads);
      figures_.push_back(search_.measure(
          {q + h * d, k + kv * d, v + kv * d, config.q_width(), config.kv_width(), tokens}));
    }
  }

  const LlamaModel& model_;
  const PrefillPlan& plan_;
  std::vector<std::optional<uint32_t>> places_;
  Team team_;
  std::unique_ptr<GpuModel> gpu_;  ///< null: the model runs on the host
  PatternSearch search_;
  std::unique_ptr<HostPrompt> dense_;  ///< on the host
  std::vector<float> q_, k_, v_;       ///< of a layer that comes from the GPU
  std::vector<uint32_t> wanted_;       ///< the model's numbers
  std::vector<std::vector<PatternFigures>> figures_;
};

std::string head_name(const PatternChoice& c) {
  return "layer " + std::to_string(c.layer) + " head " + std::to_string(c.q_head);
}
std::string percent(double share) { return format_number(100 * share) + " %"; }

}  // namespace

std::vector<PatternChoice> calibrate_prefill(const PrefillPlan& plan) {
  const LlamaModel model = load_model(plan.model);
  for (const uint32_t layer : plan.layers) {
    if (layer < model.config.full_layers()) continue;
    throw UsageError("--layers names layer " + std::to_string(layer) + "; allowed: 0 to " +
                     std::to_string(model.config.full_layers() - 1));
  }
  const std::vector<std::vector<uint32_t>> prompts = prompts_of(plan);
  PromptSearch search(model, plan);
  std::vector<std::vector<std::vector<PatternFigures>>> found;  // [prompt][head][pattern]
  for (const auto& tokens : prompts) found.push_back(search.run(tokens, found.size()));
  std::vector<PatternChoice> choices;
  const auto heads = search.heads();
  for (size_t i = 0; i < heads.size(); ++i) {
    std::vector<std::vector<PatternFigures>> of_head;
    for (auto& prompt : found) of_head.push_back(std::move(prompt[i]));
    const std::vector<PatternFigures> merged = merge_figures(of_head);
    choices.push_back({heads[i].first, heads[i].second, merged[cheapest_pattern(merged, plan.cost)],
                       merged.front()});
  }
  return choices;
}

BudgetsFile to_budgets(const std::vector<PatternChoice>& choices, const PrefillPlan& plan,
                       const std::string& machine) {
  const LlamaConfig model = load_llama_config(model_folder(plan.model) / "config.json");
  BudgetsFile out;
  out.layers = model.full_layers();
  out.q_heads = model.q_heads;
  out.kv_heads = model.kv_heads;
  out.head_dim = model.head_dim;
  out.target = {{"error", plan.requirement.error},
                {"quantile", plan.requirement.quantile},
                {"factor", plan.requirement.factor},
                {"tokens", length_of(plan.task)}};
  out.machine = machine;
  out.made_by = std::string("keyhole ") + keyhole_version() + " calibrate --prefill";
  for (const PatternChoice& c : choices) {
    BudgetsFile::Entry& entry = out.heads.emplace_back();
    entry.layer = c.layer;
    entry.q_head = c.q_head;
    entry.pattern = c.figures.pattern;
    entry.measured = {{"error_median", c.figures.error_median},
                      {"error_p95", c.figures.error_p95},
                      {"mass", c.figures.mass},
                      {"blocks", c.figures.share},
                      {"speed_up", c.dense.seconds / c.figures.seconds}};
  }
  return out;
}

std::string pattern_table(const std::vector<PatternChoice>& choices, const Style& style) {
  Table table({{"layer"},
               {"head"},
               {"pattern", Table::Align::left},
               {"blocks"},
               {"mass"},
               {"median"},
               {"p95"},
               {"held", Table::Align::left},
               {"speed-up"}});
  for (const PatternChoice& c : choices) {
    table.add_row({std::to_string(c.layer), std::to_string(c.q_head), c.figures.pattern,
                   percent(c.figures.share), format_number(c.figures.mass),
                   format_number(c.figures.error_median), format_number(c.figures.error_p95),
                   c.figures.held() ? "yes" : "no",
                   format_number(c.dense.seconds / c.figures.seconds) + "x"});
  }
  return table.text(style);
}

std::string pattern_summary(const std::vector<PatternChoice>& choices, const PrefillPlan& plan) {
  double share = 0, seconds = 0, dense_seconds = 0;
  size_t dense = 0;
  std::string broken;
  for (const PatternChoice& c : choices) {
    share += c.figures.share / static_cast<double>(choices.size());
    seconds += c.figures.seconds;
    dense_seconds += c.dense.seconds;
    dense += static_cast<size_t>(c.figures.pattern == c.dense.pattern);
    if (!c.figures.held()) broken += (broken.empty() ? "" : ", ") + head_name(c);
  }
  std::string text = std::to_string(choices.size()) + " query heads, " + std::to_string(dense) +
                     " of them dense; prompts attend " + percent(share) +
                     " of the blocks, on this machine in " + format_duration(seconds) +
                     " (dense attention " + format_duration(dense_seconds) +
                     "); the last layer attends with the last token alone\n";
  if (!broken.empty()) {
    text += "warning: " + plan.requirement.text() + " did not hold on the tiles of the check for " +
            broken + "\n";
  }
  return text;
}

}  // namespace keyhole::tools

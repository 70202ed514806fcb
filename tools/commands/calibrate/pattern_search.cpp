#include "tools/commands/calibrate/pattern_search.h"

#include <algorithm>
#include <cmath>

#include "tools/terminal/clock.h"
#include "tools/terminal/errors.h"

namespace keyhole::tools {
namespace {

constexpr size_t kTile = 128;  // queries that choose together
constexpr double kWorthSkipping = 0.9;

keyhole_engine_config engine_of_one_head(uint32_t dim, float scale, float softcap, uint32_t threads,
                                         bool on_gpu) {
  keyhole_engine_config config;
  keyhole_engine_config_init(&config);
  config.layers = config.q_heads = config.kv_heads = 1;
  config.head_dim = dim;
  if (scale > 0) config.scale = scale;
  config.softcap = softcap;
  config.device = on_gpu ? KEYHOLE_DEVICE_CUDA : KEYHOLE_DEVICE_HOST;
  config.threads = threads;
  return config;
}

}  // namespace

PatternSearch::PatternSearch(uint32_t dim, float scale, float softcap,
                             const std::vector<std::string>& patterns,
                             const Requirement& requirement, uint32_t threads, bool on_gpu)
    : dim_(dim),
      requirement_(requirement),
      engine_(make_engine(engine_of_one_head(dim, scale, softcap, threads, on_gpu))),
      patterns_(patterns),
      gpu_(on_gpu ? std::make_unique<GpuHead>(dim) : nullptr) {
  for (const std::string& pattern : patterns_) {
    try {
      prompts_.push_back(make_prompt(engine_, pattern));
    } catch (const LibraryError& e) {
      if (e.status() != KEYHOLE_INVALID_ARGUMENT) throw;
      throw UsageError("--pattern " + pattern + ": " + e.what());
    }
  }
}

double PatternSearch::attend(const PromptHandle& prompt, const HeadRows& head,
                             std::vector<float>& out, std::vector<float>& lse) {
  out.resize(head.tokens * dim_);
  lse.resize(head.tokens);
  if (gpu_ != nullptr) return gpu_->attend(prompt.get(), out.data(), lse.data());
  const Clock::time_point start = Clock::now();
  const keyhole_tensor q = host_rows(head.q, head.tokens, 1, dim_, head.q_width),
                       k = host_rows(head.k, head.tokens, 1, dim_, head.kv_width),
                       v = host_rows(head.v, head.tokens, 1, dim_, head.kv_width),
                       o = host_rows(out.data(), head.tokens, 1, dim_, dim_);
  check(keyhole_prompt_attend(prompt.get(), 0, &q, &k, &v, &o, lse.data(), nullptr));
  return seconds_since(start);
}

std::vector<PatternFigures> PatternSearch::measure(const HeadRows& head) {
  std::vector<PatternFigures> all;
  if (gpu_ != nullptr) gpu_->take(head);
  for (size_t i = 0; i < patterns_.size(); ++i) {
    PatternFigures& figures = all.emplace_back();
    figures.pattern = patterns_[i];
    const bool is_truth = i == 0;
    const PromptBlocks before = blocks_of(prompts_[i]);
    figures.seconds =
        attend(prompts_[i], head, is_truth ? exact_ : out_, is_truth ? exact_lse_ : lse_);
    if (is_truth) continue;
    const PromptBlocks after = blocks_of(prompts_[i]);
    figures.share =
        PromptBlocks{after.attended - before.attended, after.seen - before.seen}.share();
    const std::vector<double> errors = row_errors(out_.data(), exact_.data(), head.tokens, dim_);
    std::vector<double> chosen_by, checked_by;  // by every second tile each
    double mass = 0;
    for (size_t t = 0; t < head.tokens; ++t) {
      (t / kTile % 2 == 0 ? chosen_by : checked_by).push_back(errors[t]);
      mass += std::min(1.0, std::exp(double{lse_[t]} - double{exact_lse_[t]}));
    }
    if (checked_by.empty()) checked_by = chosen_by;
    figures.mass = mass / static_cast<double>(head.tokens);
    // Queries of a tile share their blocks and much of their error.
    const size_t tiles = (chosen_by.size() + kTile - 1) / kTile;
    figures.ratio = requirement_.cautious_ratio(std::move(chosen_by), tiles);
    figures.check_ratio = requirement_.ratio(checked_by);
    figures.error_median = quantile_of(checked_by, 0.5);
    figures.error_p95 = quantile_of(std::move(checked_by), 0.95);
  }
  return all;
}

std::vector<PatternFigures> merge_figures(const std::vector<std::vector<PatternFigures>>& prompts) {
  std::vector<PatternFigures> merged = prompts.front();
  const double part = 1.0 / static_cast<double>(prompts.size());
  for (size_t i = 0; i < merged.size(); ++i) {
    PatternFigures& m = merged[i];
    m.mass = m.share = m.seconds = 0;
    for (const auto& prompt : prompts) {
      const PatternFigures& f = prompt[i];
      m.ratio = std::max(m.ratio, f.ratio);
      m.check_ratio = std::max(m.check_ratio, f.check_ratio);
      m.error_median = std::max(m.error_median, f.error_median);
      m.error_p95 = std::max(m.error_p95, f.error_p95);
      m.mass += part * f.mass;
      m.share += part * f.share;
      m.seconds += part * f.seconds;
    }
  }
  return merged;
}

size_t cheapest_pattern(const std::vector<PatternFigures>& figures, PatternCost cost) {
  std::vector<Verdict> verdicts;
  for (const PatternFigures& f : figures) {
    const double blocks = f.share > kWorthSkipping ? 1.0 : f.share;
    verdicts.push_back({f.ratio, cost == PatternCost::us ? f.seconds : blocks});
  }
  return choose_cheapest(verdicts);
}

}  // namespace keyhole::tools

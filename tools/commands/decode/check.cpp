#include "tools/commands/decode/check.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "runtime/files/json.h"
#include "tools/commands/common/quantile.h"
#include "tools/generation/sequence.h"
#include "tools/terminal/interrupt.h"
#include "tools/terminal/units.h"

namespace keyhole::tools {

std::string to_text(const CheckResult& check) {
  std::string text = "against exact attention: " + std::to_string(check.agreeing) + " of " +
                     std::to_string(check.tokens) + " tokens agree";
  if (check.first_difference < check.tokens) {
    text += ", the first difference is token " + std::to_string(check.first_difference);
  }
  return text + "\noutput error of a head: median " + format_number(check.median_error) + ", p95 " +
         format_number(check.p95_error) + ", p99 " + format_number(check.p99_error) + ", largest " +
         format_number(check.max_error) + "\n";
}

nlohmann::ordered_json to_json(const CheckResult& check) {
  return {{"tokens", check.tokens},
          {"agreeing", check.agreeing},
          {"first_difference", check.first_difference},
          {"output_error",
           {{"median", check.median_error},
            {"p95", check.p95_error},
            {"p99", check.p99_error},
            {"max", check.max_error}}},
          {"layer_mean_output_error", check.layer_mean_error}};
}

OutputCheck::OutputCheck(KeyholeCache& cache, keyhole_mode mode, const LlamaConfig& model)
    : cache_(cache),
      mode_(mode),
      q_heads_(model.q_heads),
      head_dim_(model.head_dim),
      exact_(model.q_width()),
      errors_(model.layers) {}

void OutputCheck::measure(uint32_t layer, const float* q, const float* out) {
  cache_.set_mode(KEYHOLE_MODE_EXACT, 0);
  cache_.attend(layer, q, exact_.data());
  cache_.set_mode(mode_, 0);
  for (uint32_t head = 0; head < q_heads_; ++head) {
    double difference = 0.0;
    double norm = 0.0;
    for (size_t i = size_t{head} * head_dim_; i < size_t{head + 1} * head_dim_; ++i) {
      const double delta = static_cast<double>(out[i]) - exact_[i];
      difference += delta * delta;
      norm += static_cast<double>(exact_[i]) * exact_[i];
    }
    if (norm > 0.0) errors_[layer].push_back(std::sqrt(difference / norm));
  }
}

CheckResult OutputCheck::result() const {
  CheckResult result;
  std::vector<double> all;
  for (const std::vector<double>& layer : errors_) {
    all.insert(all.end(), layer.begin(), layer.end());
    result.layer_mean_error.push_back(std::accumulate(layer.begin(), layer.end(), 0.0) /
                                      static_cast<double>(std::max<size_t>(1, layer.size())));
  }
  std::sort(all.begin(), all.end());
  result.median_error = nearest_rank(all, 0.5);
  result.p95_error = nearest_rank(all, 0.95);
  result.p99_error = nearest_rank(all, 0.99);
  result.max_error = nearest_rank(all, 1.0);
  return result;
}

void compare_tokens(Decoder& decoder, KeyholeCache& cache, std::vector<uint32_t> prompt,
                    std::span<const float> logits, std::span<const uint32_t> generated,
                    CheckResult& check) {
  cache.set_mode(KEYHOLE_MODE_EXACT, 0);
  decoder.truncate(static_cast<uint32_t>(prompt.size()));
  Sequence sequence(decoder, std::move(prompt));
  check.tokens = generated.size();
  check.first_difference = generated.size();
  check.agreeing = 0;
  for (size_t i = 0; i < generated.size(); ++i) {
    throw_if_interrupted();
    if (i > 0) logits = sequence.step(generated[i - 1]);
    if (greedy(logits) == generated[i]) {
      ++check.agreeing;
    } else {
      check.first_difference = std::min(check.first_difference, i);
    }
  }
}

}  // namespace keyhole::tools

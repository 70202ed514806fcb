// The difference that decoding through an index makes, against exact attention over the same tokens.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>
#include <vector>

#include "tools/llama/decoder.h"
#include "tools/llama/keyhole_cache.h"

namespace keyhole::tools {

struct CheckResult {
  size_t tokens = 0;  ///< compared
  size_t agreeing = 0;
  /// Place of the first token that exact attention would have chosen differently; `tokens` if there is none. Up to
  /// it, free decoding with exact attention gives the same text.
  size_t first_difference = 0;
  double median_error =
      0.0;  ///< |o - o*| / |o*| of one query head, over all steps, layers and heads
  double p95_error = 0.0;
  double p99_error = 0.0;
  double max_error = 0.0;
  std::vector<double> layer_mean_error;
};

[[nodiscard]] std::string to_text(const CheckResult& check);
[[nodiscard]] nlohmann::ordered_json to_json(const CheckResult& check);

/// Attends again, exactly, with the queries of each step, and keeps the error of the output that the step used.
class OutputCheck {
 public:
  OutputCheck(KeyholeCache& cache, keyhole_mode mode, const LlamaConfig& model);

  /// Called by an attention hook: `q` and `out` are `[Hq, d]`. Leaves the cache's mode unchanged.
  void measure(uint32_t layer, const float* q, const float* out);
  /// A result with the errors filled in.
  [[nodiscard]] CheckResult result() const;

 private:
  KeyholeCache& cache_;
  keyhole_mode mode_;
  uint32_t q_heads_, head_dim_;
  std::vector<float> exact_;                 // [Hq, d]
  std::vector<std::vector<double>> errors_;  // [layer]
};

/// Runs the generated tokens once more with exact attention from the end of the prompt, and counts where it would
/// have chosen the same. `logits` follow the prompt. Leaves the cache in exact mode, and the decoder with the tokens
/// of another sequence.
void compare_tokens(Decoder& decoder, KeyholeCache& cache, std::vector<uint32_t> prompt,
                    std::span<const float> logits, std::span<const uint32_t> generated,
                    CheckResult& check);

}  // namespace keyhole::tools

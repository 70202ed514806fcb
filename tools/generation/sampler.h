// Chooses the next token from a step's logits.
#pragma once

#include <cstdint>
#include <random>
#include <span>
#include <string>
#include <vector>

namespace keyhole::tools {

/// The options of sampling. The filters work one after another in the order of the fields, as in Hugging Face
/// transformers: each sees the probabilities that the former ones left, which are made to add up to 1 again.
/// (llama.cpp applies the temperature last, so that its top-p and min-p see other numbers.)
struct SamplingOptions {
  /// Logits of tokens that the context holds are divided by it where positive and multiplied where negative; 1: none.
  double repetition_penalty = 1.0;
  /// Logits are divided by it. 0: the most likely token is chosen, whatever the filters below say.
  double temperature = 0.0;
  uint32_t top_k = 0;  ///< the k most likely tokens stay; 0: all
  double top_p =
      1.0;  ///< the fewest most likely tokens stay whose probabilities add up to so much; 1: all
  double min_p =
      0.0;  ///< tokens stay that are at least so many times as likely as the most likely one; 0: all
  uint64_t seed = 1;

  [[nodiscard]] bool greedy() const { return temperature == 0.0; }
  /// The options in effect as text: "greedy", or "temperature 0.8, top-k 40, seed 1".
  [[nodiscard]] std::string text() const;
};

/// Empty where all values are allowed, else "temperature is -1, allowed: ...", of the first that is not.
[[nodiscard]] std::string refusal(const SamplingOptions& options);

/// The position of a Sampler's random numbers.
struct SamplerState {
  uint64_t seed = 0;
  uint64_t draws = 0;
};

/// Draws tokens. The same options, logits and order of calls give the same tokens on every machine: draws come from the
/// bits of std::mt19937_64, which the standard fixes, and sums run in a fixed order in double.
class Sampler {
 public:
  /// `options` are allowed ones: see refusal().
  explicit Sampler(const SamplingOptions& options);

  struct Candidate {
    uint32_t token = 0;
    double probability = 0.0;
  };
  /// The tokens from which next() draws: those that the filters leave, most likely first, of equally likely ones the
  /// lower id first; their probabilities add up to 1. Greedy: one token. Valid until the next call. Throws as next()
  /// does.
  [[nodiscard]] std::span<const Candidate> candidates(std::span<const float> logits);

  /// The next token. Throws std::runtime_error for logits that are empty, NaN or +inf, or all -inf (-inf alone is a
  /// token that never comes), and names the first such token.
  [[nodiscard]] uint32_t next(std::span<const float> logits);

  /// Takes in tokens that are in the context now, prompt and answers, for the repetition penalty.
  void saw(std::span<const uint32_t> tokens);
  /// Takes in that the context is empty again. Draws go on where they were.
  void forget();

  /// The seed and the number of draws so far, so that a session that goes on in another run draws what it would have
  /// drawn in this one.
  [[nodiscard]] SamplerState state() const { return {options_.seed, draws_}; }
  /// Goes on behind the draws of `state` if its seed is that of the options; otherwise changes nothing.
  void go_on(const SamplerState& state);

 private:
  /// Draws a number from [0, 1) in steps of 2^-53.
  double uniform();
  /// The logits with the penalty, checked.
  std::span<const float> penalised(std::span<const float> logits);
  /// Fills candidates_ with the tokens that the filters leave, with weights in place of probabilities, and returns
  /// the sum of the weights. Their order is the same on every machine.
  double filter(std::span<const float> logits);
  void keep_share(double share);

  SamplingOptions options_;
  std::mt19937_64 bits_;
  uint64_t draws_ = 0;
  std::vector<uint32_t> seen_;  ///< each once
  std::vector<bool> is_seen_;   ///< by token
  std::vector<float> logits_;   ///< with the penalty
  std::vector<Candidate> candidates_;
};

}  // namespace keyhole::tools

#include "tools/generation/sampler.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <limits>
#include <stdexcept>

namespace keyhole::tools {
namespace {

using Candidate = Sampler::Candidate;

bool is_likelier(const Candidate& a, const Candidate& b) {
  return a.probability != b.probability ? a.probability > b.probability : a.token < b.token;
}
/// For heaps, whose front is the largest.
bool is_less_likely(const Candidate& a, const Candidate& b) { return is_likelier(b, a); }

std::string number(double value) {
  char digits[32];
  std::snprintf(digits, sizeof digits, "%g", value);
  return digits;
}

double sum_of(const std::vector<Candidate>& candidates) {
  double sum = 0.0;
  for (const Candidate& c : candidates) sum += c.probability;
  return sum;
}

/// The token of the largest logit, the first of equal ones. Throws where there is none to choose.
/// Integers in the order of floats, -0 below 0; NaNs lie beyond the infinities of their sign.
int32_t rank_of(float x) {
  const auto bits = std::bit_cast<int32_t>(x);
  return bits >= 0 ? bits : bits ^ std::numeric_limits<int32_t>::max();
}

/// The first of the largest logits; throws where one is NaN or +inf, or all are -inf.
uint32_t check_and_find_best(std::span<const float> logits) {
  if (logits.empty()) throw std::runtime_error("there are no logits to choose a token by");
  // Extremes of integers, which compilers turn into vector code: a large vocabulary is 128,000 logits for every token.
  constexpr auto kInfinity = std::numeric_limits<float>::infinity();
  int32_t highest = rank_of(-kInfinity), lowest = rank_of(kInfinity);
  for (const float x : logits) {
    highest = std::max(highest, rank_of(x));
    lowest = std::min(lowest, rank_of(x));
  }
  if (highest >= rank_of(kInfinity) || lowest < rank_of(-kInfinity)) {
    const auto bad = std::find_if(logits.begin(), logits.end(),
                                  [](float x) { return std::isnan(x) || x == kInfinity; });
    throw std::runtime_error("the logit of token " + std::to_string(bad - logits.begin()) + " is " +
                             number(*bad) +
                             ", allowed: numbers and -inf; the model's weights or the format of "
                             "its K and V do not hold what it computes");
  }
  if (highest == rank_of(-kInfinity)) {
    throw std::runtime_error("the logits of all " + std::to_string(logits.size()) +
                             " tokens are -inf, allowed: at least one number");
  }
  // By value, so that 0 and -0 are one.
  const float largest =
      std::bit_cast<float>(highest >= 0 ? highest : highest ^ std::numeric_limits<int32_t>::max());
  return static_cast<uint32_t>(std::find(logits.begin(), logits.end(), largest) - logits.begin());
}

}  // namespace

std::string SamplingOptions::text() const {
  std::string out = greedy() ? "greedy" : "temperature " + number(temperature);
  if (!greedy() && top_k != 0) out += ", top-k " + std::to_string(top_k);
  if (!greedy() && top_p < 1.0) out += ", top-p " + number(top_p);
  if (!greedy() && min_p > 0.0) out += ", min-p " + number(min_p);
  if (repetition_penalty != 1.0) out += ", repetition penalty " + number(repetition_penalty);
  if (!greedy()) out += ", seed " + std::to_string(seed);
  return out;
}

std::string refusal(const SamplingOptions& options) {
  // Written so that NaN is refused.
  const auto refused = [](const char* name, double value, const char* allowed) {
    return std::string(name) + " is " + number(value) + ", allowed: " + allowed;
  };
  if (!(options.repetition_penalty > 0.0) || std::isinf(options.repetition_penalty)) {
    return refused("repetition penalty", options.repetition_penalty, "above 0; 1 for none");
  }
  if (!(options.temperature >= 0.0) || std::isinf(options.temperature)) {
    return refused("temperature", options.temperature, "0 (the most likely token) or more");
  }
  if (!(options.top_p > 0.0 && options.top_p <= 1.0)) {
    return refused("top-p", options.top_p, "above 0 and at most 1");
  }
  if (!(options.min_p >= 0.0 && options.min_p <= 1.0)) {
    return refused("min-p", options.min_p, "from 0 to 1");
  }
  return "";
}

Sampler::Sampler(const SamplingOptions& options) : options_(options), bits_(options.seed) {}

void Sampler::saw(std::span<const uint32_t> tokens) {
  if (options_.repetition_penalty == 1.0) return;
  for (const uint32_t token : tokens) {
    if (token >= is_seen_.size()) is_seen_.resize(size_t{token} + 1);
    if (is_seen_[token]) continue;
    is_seen_[token] = true;
    seen_.push_back(token);
  }
}

void Sampler::forget() {
  is_seen_.clear();
  seen_.clear();
}

std::span<const float> Sampler::penalised(std::span<const float> logits) {
  if (seen_.empty()) return logits;
  const auto penalty = static_cast<float>(options_.repetition_penalty);
  logits_.assign(logits.begin(), logits.end());
  for (const uint32_t token : seen_) {
    if (token >= logits_.size()) continue;
    float& logit = logits_[token];
    logit = logit > 0.0F ? logit / penalty : logit * penalty;
  }
  return logits_;
}

void Sampler::keep_share(double share) {
  const double enough = share * sum_of(candidates_);
  // A heap takes no more time than the tokens that stay are worth: of 100,000 they are mostly a few hundred.
  const auto begin = candidates_.begin();
  auto unsorted = candidates_.end();
  std::make_heap(begin, unsorted, is_less_likely);
  double sum = 0.0;
  while (unsorted != begin && sum < enough) {
    sum += begin->probability;
    std::pop_heap(begin, unsorted--, is_less_likely);
  }
  candidates_.erase(begin, unsorted);
  std::reverse(candidates_.begin(), candidates_.end());
}

double Sampler::filter(std::span<const float> given) {
  // Before the penalty as well: it would hide whose fault a NaN is.
  uint32_t best = check_and_find_best(given);
  const std::span<const float> logits = penalised(given);
  if (logits.data() != given.data()) best = check_and_find_best(logits);
  candidates_.clear();
  if (options_.greedy()) {
    candidates_.push_back({best, 1.0});
    return 1.0;
  }
  // Weights relative to that of the best token, which is 1.
  const double largest = logits[best];
  const double scale = 1.0 / options_.temperature;
  for (size_t i = 0; i < logits.size(); ++i) {
    const double below = static_cast<double>(logits[i]) - largest;
    // A difference of 0 stays one at temperatures whose inverse is infinite.
    const double weight = below == 0.0 ? 1.0 : std::exp(below * scale);
    if (weight > 0.0) candidates_.push_back({static_cast<uint32_t>(i), weight});
  }
  if (options_.top_k != 0 && options_.top_k < candidates_.size()) {
    const auto end = candidates_.begin() + options_.top_k;
    std::nth_element(candidates_.begin(), end, candidates_.end(), is_likelier);
    candidates_.erase(end, candidates_.end());
    // The order that is left is the library's own: sums want one that is the same everywhere.
    std::sort(candidates_.begin(), candidates_.end(), is_likelier);
  }
  if (options_.top_p < 1.0) keep_share(options_.top_p);
  if (options_.min_p > 0.0) {
    std::erase_if(candidates_,
                  [this](const Candidate& c) { return c.probability < options_.min_p; });
  }
  return sum_of(candidates_);
}

std::span<const Candidate> Sampler::candidates(std::span<const float> logits) {
  const double total = filter(logits);
  for (Candidate& c : candidates_) c.probability /= total;
  std::sort(candidates_.begin(), candidates_.end(), is_likelier);
  return candidates_;
}

uint32_t Sampler::next(std::span<const float> logits) {
  double left = filter(logits);
  if (options_.greedy()) return candidates_.front().token;
  left *= uniform();
  for (const Candidate& c : candidates_) {
    left -= c.probability;
    if (left < 0.0) return c.token;
  }
  return candidates_.back().token;  // rounding: the sum fell short
}

double Sampler::uniform() {
  ++draws_;
  return static_cast<double>(bits_() >> 11U) * 0x1p-53;
}

void Sampler::go_on(const SamplerState& state) {
  if (state.seed != options_.seed) return;
  bits_.seed(options_.seed);
  bits_.discard(state.draws);
  draws_ = state.draws;
}

}  // namespace keyhole::tools

#include "tools/generation/sequence.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "tools/terminal/clock.h"

namespace keyhole::tools {

Sequence::Sequence(Decoder& decoder, std::vector<uint32_t> taken)
    : decoder_(decoder), tokens_(std::move(taken)) {
  if (tokens_.size() != decoder_.tokens()) {
    throw std::invalid_argument("a sequence of " + std::to_string(tokens_.size()) +
                                " tokens, a decoder of " + std::to_string(decoder_.tokens()));
  }
}

std::span<const float> Sequence::extend(std::span<const uint32_t> tokens) {
  if (decoder_.turns_otherwise(tokens_.size() + tokens.size())) {
    std::vector<uint32_t> all = tokens_;
    all.insert(all.end(), tokens.begin(), tokens.end());
    if (take_anew_) {
      take_anew_(all);
    } else {
      (void)bring_to(all);
    }
    return logits_;
  }
  logits_ = {};
  logits_ = tokens.size() == 1 ? decoder_.step(tokens.front()) : decoder_.extend(tokens);
  tokens_.insert(tokens_.end(), tokens.begin(), tokens.end());
  return logits_;
}

void Sequence::truncate(size_t tokens) {
  if (tokens >= tokens_.size()) return;
  decoder_.truncate(static_cast<uint32_t>(tokens));
  tokens_.resize(tokens);
  logits_ = {};
}

bool Sequence::can_go_back_to(size_t tokens) {
  try {
    truncate(tokens);
  } catch (const std::runtime_error&) {
    return false;  // layers with a sliding window have not kept enough
  }
  return tokens > 0;
}

void Sequence::prefill(std::span<const uint32_t> tokens, const PrefillProgress& progress) {
  truncate(0);
  try {
    logits_ = decoder_.prefill(tokens, progress);
  } catch (...) {
    // Some layers hold a part of it.
    decoder_.truncate(0);
    throw;
  }
  tokens_.assign(tokens.begin(), tokens.end());
}

Sequence::Work Sequence::bring_to(std::span<const uint32_t> tokens,
                                  const PrefillProgress& progress) {
  if (tokens.empty()) throw std::runtime_error("the prompt is empty; at least one token is needed");
  const Clock::time_point start = Clock::now();
  const size_t had = tokens_.size();
  const size_t shorter = std::min(had, tokens.size());
  auto same = static_cast<size_t>(std::mismatch(tokens_.begin(),
                                                tokens_.begin() + static_cast<ptrdiff_t>(shorter),
                                                tokens.begin())
                                      .first -
                                  tokens_.begin());
  Work work;
  const bool nothing_missing = same == tokens.size() && same == had && !logits_.empty();
  if (!nothing_missing && same == tokens.size()) --same;
  const size_t missing = tokens.size() - same;
  if (decoder_.turns_otherwise(tokens.size()) ||
      decoder_.worth_in_prefill(missing) > tokens.size() + Decoder::kPrefilledTokensPerStep ||
      !can_go_back_to(same)) {
    work.forgotten = had;
    work.prefilled = tokens.size();
    prefill(tokens, progress);
  } else {
    work.reused = same;
    work.forgotten = had - same;
    work.stepped = missing;
    for (size_t i = same; i < tokens.size();) {
      if (progress) progress(static_cast<double>(i - same) / static_cast<double>(missing));
      const size_t count = std::min(decoder_.tokens_at_once(), tokens.size() - i);
      extend(tokens.subspan(i, count));
      i += count;
    }
  }
  work.seconds = seconds_since(start);
  return work;
}

}  // namespace keyhole::tools

// A decoder without a model, whose logits say which tokens it has taken, and a vocabulary of given texts.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "tools/llama/decoder.h"
#include "tools/tokenizer/tokenizer.h"

namespace keyhole::tools::testing {

/// A decoder whose largest logit of 100 is that of a hash of all tokens taken, or of what `script` says for this many
/// of them.
class FakeDecoder final : public Decoder {
 public:
  using Decoder::prefill;
  std::span<const float> prefill(std::span<const uint32_t> tokens,
                                 const PrefillProgress& progress) override {
    if (!taken.empty()) throw std::logic_error("a prefill after tokens");
    ++prefills;
    if (progress) progress(0.5);
    taken.assign(tokens.begin(), tokens.end());
    rope_tokens_ = tokens.size();
    return logits();
  }
  std::span<const float> step(uint32_t token) override {
    if (turns_otherwise(taken.size() + 1)) throw std::logic_error("past what was turned");
    ++steps;
    taken.push_back(token);
    return logits();
  }
  std::span<const float> extend(std::span<const uint32_t> tokens) override {
    if (tokens.size() > at_once) throw std::logic_error("more tokens than at once");
    if (turns_otherwise(taken.size() + tokens.size()))
      throw std::logic_error("past what was turned");
    ++extensions;
    taken.insert(taken.end(), tokens.begin(), tokens.end());
    return logits();
  }
  [[nodiscard]] size_t tokens_at_once() const override { return at_once; }
  void truncate(uint32_t tokens) override {
    if (tokens > 0 && tokens < least_tokens) throw std::runtime_error("not so far");
    taken.resize(std::min<size_t>(taken.size(), tokens));
  }
  [[nodiscard]] uint32_t tokens() const override { return static_cast<uint32_t>(taken.size()); }
  [[nodiscard]] size_t rope_tokens() const override { return rope_tokens_; }
  [[nodiscard]] bool turns_otherwise(size_t tokens) const override {
    return (rope_tokens_ > original_context) != (tokens > original_context);
  }
  void set_attention_hook(AttentionHook) override {}
  [[nodiscard]] const StepTimes& times() const override { return times_; }
  void reset_times() override {}

  /// The token that it chooses after `tokens`.
  [[nodiscard]] uint32_t after(const std::vector<uint32_t>& tokens) const {
    if (tokens.size() < script.size()) return script[tokens.size()];
    uint32_t hash = 17;
    for (const uint32_t token : tokens) hash = hash * 31 + token;
    return hash % 100;
  }

  std::vector<uint32_t> taken, script;
  int prefills = 0, steps = 0, extensions = 0;
  size_t at_once = 1;
  size_t original_context = SIZE_MAX;  ///< sequences beyond it are turned otherwise
  uint32_t least_tokens = 0;           ///< it can go back to so many, or to none

 private:
  std::span<const float> logits() {
    logits_.assign(100, 0.0F);
    logits_[after(taken)] = 1.0F;
    return logits_;
  }
  size_t rope_tokens_ = 0;
  std::vector<float> logits_;
  StepTimes times_;
};

/// A tokenizer whose token i is texts[i]; the ends are special.
class FakeTokenizer final : public Tokenizer {
 public:
  FakeTokenizer(std::vector<std::string> texts, std::vector<uint32_t> ends)
      : texts_(std::move(texts)), ends_(std::move(ends)) {}
  [[nodiscard]] std::vector<uint32_t> encode(std::string_view, Specials,
                                             std::span<const TextRange>) const override {
    return {};
  }
  [[nodiscard]] std::vector<uint32_t> encode_prompt(std::string_view, Specials) const override {
    return {};
  }
  void decode_next(uint32_t token, DecodeState&, std::string& bytes) const override {
    if (token < texts_.size() && !is_special(token)) bytes += texts_[token];
  }
  [[nodiscard]] std::optional<uint32_t> token_id(std::string_view) const override { return {}; }
  [[nodiscard]] std::string token_text(uint32_t token) const override { return texts_.at(token); }
  [[nodiscard]] bool is_special(uint32_t token) const override { return ends(token); }
  [[nodiscard]] uint32_t vocab_size() const override { return 100; }
  [[nodiscard]] const std::vector<uint32_t>& end_tokens() const override { return ends_; }

 private:
  std::vector<std::string> texts_;
  std::vector<uint32_t> ends_;
};

}  // namespace keyhole::tools::testing

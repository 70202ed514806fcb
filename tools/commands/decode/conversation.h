// A model, its session and what has been said: the tokens of prompts and answers, and how they go on.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "tools/commands/common/decoding.h"
#include "tools/generation/generator.h"
#include "tools/generation/saved_session.h"

namespace keyhole::tools {

/// What a session that was loaded holds: these tokens, turned as a sequence of `rope_tokens` is.
struct HeldConversation {
  std::vector<uint32_t> tokens;
  size_t rope_tokens = 0;
};

/// One thread at a time. An exception or Interrupted leaves it usable: tokens() is what it was, and the session catches up with
/// the next take().
class Conversation {
 public:
  /// An empty session of `cache`, or one that holds `held`. `budget` is of `spec`; `built`: the cache attends
  /// by them already. Borrows the runner.
  Conversation(Runner& runner, KeyholeCache cache, AttendSpec spec, BudgetChoice budget,
               const SamplingOptions& sampling, HeldConversation held = {}, bool built = false);
  Conversation(const Conversation&) = delete;
  Conversation& operator=(const Conversation&) = delete;

  struct Taken {
    Sequence::Work work;
    double build_seconds = 0.0;
  };
  /// Makes `tokens` all that has been said, with a progress bar and Ctrl-C (Interrupted): runs what the session lacks of them
  /// and builds the index where a prompt was prefilled. Throws std::runtime_error where they leave no room for an answer.
  Taken take(std::vector<uint32_t> tokens);

  /// The same of tokens that begin with what has been taken: the others come as a later turn does, with a progress bar and Ctrl-C, by
  /// extend_by_turn().
  TurnCost take_turn(std::vector<uint32_t> tokens);

  /// An answer to what has been said, after take(). It goes on as long as it is asked for tokens. Ends before the session is
  /// full whatever `stops` says.
  [[nodiscard]] Generator answer(const Tokenizer* tokenizer, Stops stops, DecodeState follows);
  /// The answer's tokens have been said.
  void add(const Generator& answer);

  /// All that has been said. The session may be some tokens behind.
  [[nodiscard]] const std::vector<uint32_t>& tokens() const { return tokens_; }
  /// Tokens that the session can hold.
  [[nodiscard]] uint32_t capacity() const { return capacity_; }
  /// Sampled answers go on behind what was drawn for a session, where the seed is the same.
  void go_on(const SamplerState& state) { sampler_.go_on(state); }
  /// Forgets everything.
  void reset();
  /// Writes it for --load-session, as a session of `of`: model, identity and kv_dtype. What the session lacks of tokens()
  /// stays to be taken.
  void save(const std::filesystem::path& path, SavedSession of);

  [[nodiscard]] Runner& runner() { return runner_; }
  [[nodiscard]] KeyholeCache& cache() { return cache_; }
  [[nodiscard]] Decoder& decoder() { return *decoder_; }
  [[nodiscard]] const Sequence& sequence() const { return sequence_; }
  [[nodiscard]] const AttendSpec& spec() const { return spec_; }
  [[nodiscard]] const BudgetChoice& budget() const { return budget_; }

 private:
  /// Throws std::runtime_error where so many tokens leave no room for an answer.
  void check_room(size_t tokens) const;
  void have_said(std::vector<uint32_t> tokens);
  /// Makes `tokens` the sequence, and builds the index where a prompt was prefilled.
  Taken bring_to(std::span<const uint32_t> tokens);

  Runner& runner_;
  KeyholeCache cache_;
  std::unique_ptr<Decoder> decoder_;
  Sequence sequence_;
  AttendSpec spec_;
  BudgetChoice budget_;
  Sampler sampler_;
  std::vector<uint32_t> tokens_;
  uint32_t capacity_;
  bool built_;
};

}  // namespace keyhole::tools

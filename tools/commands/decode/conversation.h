// A conversation: a model, its session and what has been said, that is the tokens of prompts and answers.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "tools/commands/common/attend_spec.h"
#include "tools/commands/common/decoding.h"
#include "tools/generation/generator.h"
#include "tools/generation/saved_session.h"

namespace keyhole::tools {

/// The content of a loaded session: these tokens, turned by RoPE like a sequence of `rope_tokens`.
struct HeldConversation {
  std::vector<uint32_t> tokens;
  size_t rope_tokens = 0;
};

/// A conversation, for one thread at a time. An exception or Interrupted leaves it usable: tokens() is unchanged, and
/// the session catches up with the next take().
class Conversation {
 public:
  /// Begins with an empty session of `cache`, or one that holds `held`. `budget` is of `spec`; `built`: the cache
  /// attends by them already. Borrows the runner.
  Conversation(Runner& runner, KeyholeCache cache, AttendSpec spec, BudgetChoice budget,
               const SamplingOptions& sampling, HeldConversation held = {}, bool built = false);
  Conversation(const Conversation&) = delete;
  Conversation& operator=(const Conversation&) = delete;

  struct Taken {
    Sequence::Work work;
    double build_seconds = 0.0;
  };
  /// Makes `tokens` all that has been said, with a progress bar and Ctrl-C (Interrupted): runs those that the session
  /// lacks, and builds the index where a prompt was prefilled. Throws std::runtime_error where they leave no room for
  /// an answer.
  Taken take(std::vector<uint32_t> tokens);

  /// take() for tokens that begin with those taken before: the others come as a later turn does, by extend_by_turn(),
  /// with a progress bar and Ctrl-C.
  TurnCost take_turn(std::vector<uint32_t> tokens);

  /// Begins an answer to what has been said, after take(). It goes on as long as tokens are asked for, but ends
  /// before the session is full whatever `stops` says.
  [[nodiscard]] Generator answer(const Tokenizer* tokenizer, Stops stops, DecodeState follows);
  /// Adds the answer's tokens to what has been said.
  void add(const Generator& answer);

  /// The tokens of all that has been said. The session may be some tokens behind.
  [[nodiscard]] const std::vector<uint32_t>& tokens() const { return tokens_; }
  /// The number of tokens that the session can hold.
  [[nodiscard]] uint32_t capacity() const { return capacity_; }
  /// Lets sampled answers go on behind the draws of a saved session, if the seed is the same.
  void go_on(const SamplerState& state) { sampler_.go_on(state); }
  /// Forgets everything that has been said.
  void reset();
  /// Writes the session for --load-session, with model, identity and kv_dtype of `of`. Tokens that the session lacks
  /// are saved as not taken yet.
  void save(const std::filesystem::path& path, SavedSession of);

  [[nodiscard]] Runner& runner() { return runner_; }
  [[nodiscard]] KeyholeCache& cache() { return cache_; }
  [[nodiscard]] Decoder& decoder() { return *decoder_; }
  [[nodiscard]] const Sequence& sequence() const { return sequence_; }
  [[nodiscard]] const AttendSpec& spec() const { return spec_; }
  [[nodiscard]] const BudgetChoice& budget() const { return budget_; }

 private:
  /// Throws std::runtime_error where this many tokens leave no room for an answer.
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

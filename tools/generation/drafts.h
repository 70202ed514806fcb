// Greedy decoding by drafts (speculative decoding, Leviathan et al. 2023, arXiv 2211.17192): one decoder guesses tokens
// ahead, another takes them all at once and keeps those that it would have chosen itself.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "tools/llama/decoder.h"

namespace keyhole::tools {

/// The tokens of one round that the target has kept, of those that were drafted; behind them it chose one more itself.
struct DraftRound {
  uint32_t drafted = 0;
  uint32_t accepted = 0;
};

/// Tokens, and the rounds by which they came. The last round may have brought more than are kept.
struct DraftedTokens {
  std::vector<uint32_t> tokens;
  std::vector<DraftRound> rounds;
};

/// The extent of decoding by drafts.
struct DraftLimits {
  uint32_t ahead = 8;  ///< tokens drafted in a round, at least 1
  size_t tokens = 0;   ///< in all
  /// Whether a token ends the text, and is its last one; empty: none does.
  std::function<bool(uint32_t)> ends;
};

/// Continues a text behind `last`, its last token, which neither of the two decoders has taken yet; what they hold is
/// the same text. In each round the draft decodes `ahead` tokens greedily, the target takes them by one extend_each(),
/// and both go back to those that the target's own greedy choices agree with. So the tokens are those that the target
/// would choose alone, up to the rounding by which several tokens at once differ from one. Every round is whole: it may
/// draft beyond the last token. Both decoders need room for `tokens + ahead + 1` tokens. `on_round`, called after each
/// round with the number of tokens so far, may throw.
[[nodiscard]] DraftedTokens decode_by_drafts(Decoder& target, Decoder& draft, uint32_t last,
                                             const DraftLimits& limits,
                                             const std::function<void(size_t)>& on_round = {});

/// Tokens that a decoder chose alone, and by how much.
struct PlainTokens {
  std::vector<uint32_t> tokens;
  std::vector<double> margins;  ///< of each: its logit less the next best one's, in nats
};

/// The tokens that the decoder chooses alone, behind `last`.
[[nodiscard]] PlainTokens decode_plainly(Decoder& decoder, uint32_t last,
                                         const DraftLimits& limits);

/// How far decoding by drafts went together with plain decoding of the same target.
struct PlainPart {
  size_t tokens = 0;  ///< the first ones, which are the same
  /// Plain decoding's margin of the token at which they part: a small one is a tie that rounding decides. NaN where
  /// they do not.
  double margin = 0.0;
};
[[nodiscard]] PlainPart compare_with_plain(const std::vector<uint32_t>& drafted,
                                           const PlainTokens& plain);

/// Sums over rounds.
struct DraftSums {
  size_t rounds = 0, drafted = 0, accepted = 0;
  /// The number of rounds that drafted a token at that place, and of those whose target accepted it and all before it.
  std::vector<size_t> drafted_at, accepted_at;

  void add(const DraftRound& round);
  /// Accepted tokens of a round, on average; one more is what a pass of the target brings.
  [[nodiscard]] double mean_accepted() const {
    return static_cast<double>(accepted) / static_cast<double>(rounds);
  }
  /// The share of accepted tokens at each place, `[ahead]`.
  [[nodiscard]] std::vector<double> shares() const;
};

}  // namespace keyhole::tools

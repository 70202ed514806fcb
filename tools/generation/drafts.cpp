#include "tools/generation/drafts.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>
#include <stdexcept>
#include <string>

namespace keyhole::tools {

DraftedTokens decode_by_drafts(Decoder& target, Decoder& draft, uint32_t last,
                               const DraftLimits& limits,
                               const std::function<void(size_t)>& on_round) {
  if (target.tokens() != draft.tokens()) {
    throw std::invalid_argument("the target has " + std::to_string(target.tokens()) +
                                " tokens, the draft " + std::to_string(draft.tokens()));
  }
  if (limits.ahead == 0) throw std::invalid_argument("0 tokens ahead; allowed: 1 and more");
  DraftedTokens out;
  std::vector<float> logits;
  std::vector<uint32_t> taken;
  bool ended = false;
  for (uint32_t next = last; !ended && out.tokens.size() < limits.tokens;) {
    const uint32_t before = target.tokens();
    taken = {next};
    while (taken.size() <= limits.ahead) taken.push_back(greedy(draft.step(taken.back())));

    target.extend_each(taken, logits);
    const size_t vocabulary = logits.size() / taken.size();
    const auto chosen = [&](size_t i) {
      return greedy(std::span(logits).subspan(i * vocabulary, vocabulary));
    };
    uint32_t accepted = 0;
    while (accepted < limits.ahead && chosen(accepted) == taken[accepted + 1]) ++accepted;
    next = chosen(accepted);
    out.rounds.push_back({limits.ahead, accepted});

    taken.push_back(next);  // behind those that were accepted, in the place of one that was not
    taken[accepted + 1] = next;
    for (size_t i = 1; i <= accepted + 1 && !ended && out.tokens.size() < limits.tokens; ++i) {
      out.tokens.push_back(taken[i]);
      ended = limits.ends && limits.ends(taken[i]);
    }
    if (on_round) on_round(out.tokens.size());

    // `next` is the one that neither has taken. The draft has not taken the last token that it drafted.
    target.truncate(before + 1 + accepted);
    if (accepted == limits.ahead) {
      (void)draft.step(taken[accepted]);
    } else {
      draft.truncate(before + 1 + accepted);
    }
  }
  return out;
}

PlainTokens decode_plainly(Decoder& decoder, uint32_t last, const DraftLimits& limits) {
  PlainTokens out;
  for (uint32_t next = last; out.tokens.size() < limits.tokens;) {
    const std::span<const float> logits = decoder.step(next);
    next = greedy(logits);
    double second = -std::numeric_limits<double>::infinity();
    for (size_t i = 0; i < logits.size(); ++i) {
      if (i != next) second = std::max<double>(second, logits[i]);
    }
    out.tokens.push_back(next);
    out.margins.push_back(logits[next] - second);
    if (limits.ends && limits.ends(next)) break;
  }
  return out;
}

PlainPart compare_with_plain(const std::vector<uint32_t>& drafted, const PlainTokens& plain) {
  const auto [ours, theirs] =
      std::mismatch(drafted.begin(), drafted.end(), plain.tokens.begin(), plain.tokens.end());
  const auto same = static_cast<size_t>(ours - drafted.begin());
  const bool parts = ours != drafted.end() && theirs != plain.tokens.end();
  return {same, parts ? plain.margins[same] : std::nan("")};
}

void DraftSums::add(const DraftRound& round) {
  ++rounds;
  drafted += round.drafted;
  accepted += round.accepted;
  if (drafted_at.size() < round.drafted) {
    drafted_at.resize(round.drafted);
    accepted_at.resize(round.drafted);
  }
  for (uint32_t i = 0; i < round.drafted; ++i) {
    ++drafted_at[i];
    accepted_at[i] += i < round.accepted ? 1 : 0;
  }
}

std::vector<double> DraftSums::shares() const {
  std::vector<double> out;
  for (size_t i = 0; i < drafted_at.size(); ++i) {
    out.push_back(static_cast<double>(accepted_at[i]) / static_cast<double>(drafted_at[i]));
  }
  return out;
}

}  // namespace keyhole::tools

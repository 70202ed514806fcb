// Decoding by drafts beside the rounds that follow from the positions at which a draft errs.
#include "tools/generation/drafts.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "tests/tools/generation/fake_decoder.h"

namespace keyhole::tools {
namespace {

using testing::FakeDecoder;

/// A decoder that chooses as FakeDecoder does, but another token behind so many tokens as `errs` says.
class ErringDecoder final : public Decoder {
 public:
  explicit ErringDecoder(std::function<bool(size_t)> errs) : errs_(std::move(errs)) {}
  using Decoder::prefill;
  std::span<const float> prefill(std::span<const uint32_t> tokens,
                                 const PrefillProgress& progress) override {
    return changed(inner.prefill(tokens, progress));
  }
  std::span<const float> step(uint32_t token) override { return changed(inner.step(token)); }
  void truncate(uint32_t tokens) override { inner.truncate(tokens); }
  [[nodiscard]] uint32_t tokens() const override { return inner.tokens(); }
  void set_attention_hook(AttentionHook) override {}
  [[nodiscard]] const StepTimes& times() const override { return inner.times(); }
  void reset_times() override {}

  FakeDecoder inner;

 private:
  std::span<const float> changed(std::span<const float> logits) {
    logits_.assign(logits.begin(), logits.end());
    if (errs_(inner.taken.size())) {
      std::rotate(logits_.begin(), logits_.end() - 1, logits_.end());  // the next token's id
    }
    return logits_;
  }
  std::function<bool(size_t)> errs_;
  std::vector<float> logits_;
};

const std::vector<uint32_t> kPrompt = {5, 6, 7, 8};
constexpr uint32_t kLast = 9;

/// The tokens that follow the prompt and kLast greedily.
std::vector<uint32_t> plain(size_t count) {
  std::vector<uint32_t> all = kPrompt, out;
  all.push_back(kLast);
  while (out.size() < count) {
    out.push_back(FakeDecoder().after(all));
    all.push_back(out.back());
  }
  return out;
}

TEST(Drafts, AModelAcceptsAllOfItsOwn) {
  for (const uint32_t ahead : {1U, 2U, 7U}) {
    FakeDecoder target, draft;
    (void)target.prefill(kPrompt);
    (void)draft.prefill(kPrompt);
    const DraftedTokens seen = decode_by_drafts(target, draft, kLast, {ahead, 40, {}});
    EXPECT_EQ(seen.tokens, plain(40));
    EXPECT_EQ(seen.rounds.size(), (40 + ahead) / (ahead + 1));
    for (const DraftRound& round : seen.rounds) {
      EXPECT_EQ(round.drafted, ahead);
      EXPECT_EQ(round.accepted, ahead);
    }
    EXPECT_EQ(target.taken, draft.taken);
    EXPECT_EQ(target.steps, static_cast<int>(seen.rounds.size() * (ahead + 1)));
  }
}

TEST(Drafts, RoundsEndWhereTheDraftErrs) {
  for (const uint64_t seed : {1U, 2U, 3U}) {
    // A third of the positions, by a hash.
    const auto errs = [seed](size_t taken) {
      return (taken * 2654435761U + seed * 40503U) % 1000 < 333;
    };
    for (const uint32_t ahead : {1U, 3U, 8U}) {
      FakeDecoder target;
      ErringDecoder draft(errs);
      (void)target.prefill(kPrompt);
      (void)draft.prefill(kPrompt);
      std::vector<size_t> shown;
      const DraftedTokens seen = decode_by_drafts(target, draft, kLast, {ahead, 100, {}},
                                                  [&](size_t tokens) { shown.push_back(tokens); });
      EXPECT_EQ(seen.tokens, plain(100)) << "seed " << seed << ", ahead " << ahead;

      // The text is the same whatever is drafted, so a round ends by its position alone.
      size_t taken = kPrompt.size(), round = 0, tokens = 0;
      while (tokens < 100) {
        uint32_t accepted = 0;
        while (accepted < ahead && !errs(taken + 1 + accepted)) ++accepted;
        ASSERT_LT(round, seen.rounds.size());
        EXPECT_EQ(seen.rounds[round].accepted, accepted) << "seed " << seed << ", round " << round;
        taken += accepted + 1;
        tokens = std::min<size_t>(100, tokens + accepted + 1);
        EXPECT_EQ(shown[round], tokens);
        ++round;
      }
      EXPECT_EQ(round, seen.rounds.size());
      EXPECT_EQ(target.taken, draft.inner.taken) << "both stand behind what was accepted";
      EXPECT_EQ(target.taken.size(), taken);
    }
  }
}

TEST(Drafts, ADraftThatAlwaysErrsChangesNothing) {
  FakeDecoder target;
  ErringDecoder draft([](size_t) { return true; });
  (void)target.prefill(kPrompt);
  (void)draft.prefill(kPrompt);
  const DraftedTokens seen = decode_by_drafts(target, draft, kLast, {4, 12, {}});
  EXPECT_EQ(seen.tokens, plain(12));
  ASSERT_EQ(seen.rounds.size(), 12U);
  for (const DraftRound& round : seen.rounds) EXPECT_EQ(round.accepted, 0U);
}

TEST(Drafts, EndWithATokenThatEndsTheText) {
  const std::vector<uint32_t> all = plain(30);
  const uint32_t end = all[13];
  const auto first = static_cast<size_t>(std::find(all.begin(), all.end(), end) - all.begin());
  const auto ends = [end](uint32_t token) { return token == end; };
  for (const uint32_t ahead : {1U, 5U, 20U}) {
    FakeDecoder target, draft, alone;
    for (FakeDecoder* decoder : {&target, &draft, &alone}) (void)decoder->prefill(kPrompt);
    const DraftedTokens seen = decode_by_drafts(target, draft, kLast, {ahead, 30, ends});
    EXPECT_EQ(seen.tokens, std::vector<uint32_t>(all.begin(), all.begin() + 1 + first));
    const PlainTokens alone_tokens = decode_plainly(alone, kLast, {ahead, 30, ends});
    EXPECT_EQ(alone_tokens.tokens, seen.tokens);
    ASSERT_EQ(alone_tokens.margins.size(), seen.tokens.size());
    for (const double margin : alone_tokens.margins) EXPECT_GT(margin, 0.0);
    // Whole rounds: the one with the end drafted beyond it.
    EXPECT_EQ(seen.rounds.size(), (first + 1 + ahead) / (ahead + 1));
    EXPECT_EQ(seen.rounds.back().accepted, ahead);
  }
}

TEST(Drafts, PartFromPlainDecodingAtAToken) {
  const PlainTokens plain_tokens = {{3, 4, 5}, {0.5, 0.25, 0.125}};
  const auto parts = [&](const std::vector<uint32_t>& drafted) {
    return compare_with_plain(drafted, plain_tokens);
  };
  EXPECT_EQ(parts({3, 7, 5}).tokens, 1U);
  EXPECT_EQ(parts({3, 7, 5}).margin, 0.25);
  EXPECT_EQ(parts({4}).margin, 0.5);
  for (const std::vector<uint32_t>& same : {std::vector<uint32_t>{3, 4, 5}, {3, 4}, {3, 4, 5, 6}}) {
    EXPECT_EQ(parts(same).tokens, std::min<size_t>(3, same.size()));
    EXPECT_TRUE(std::isnan(parts(same).margin));
  }
}

TEST(Drafts, MarginsAreThoseOfTheLogits) {
  FakeDecoder decoder, beside;
  (void)decoder.prefill(kPrompt);
  (void)beside.prefill(kPrompt);
  const PlainTokens tokens = decode_plainly(decoder, kLast, {1, 5, {}});
  uint32_t last = kLast;
  for (size_t i = 0; i < 5; ++i) {
    const std::span<const float> logits = beside.step(last);
    std::vector<double> sorted(logits.begin(), logits.end());
    std::sort(sorted.rbegin(), sorted.rend());
    EXPECT_DOUBLE_EQ(tokens.margins[i], sorted[0] - sorted[1]);
    last = tokens.tokens[i];
  }
}

TEST(Drafts, OfDecodersThatHoldTheSame) {
  FakeDecoder target, draft;
  (void)target.prefill(kPrompt);
  EXPECT_THROW((void)decode_by_drafts(target, draft, kLast, {1, 1, {}}), std::invalid_argument);
  (void)draft.prefill(kPrompt);
  EXPECT_THROW((void)decode_by_drafts(target, draft, kLast, {0, 1, {}}), std::invalid_argument);
  EXPECT_TRUE(decode_by_drafts(target, draft, kLast, {1, 0, {}}).rounds.empty());
}

TEST(DraftSums, CountByPlace) {
  DraftSums sums;
  for (const DraftRound round :
       {DraftRound{3, 0}, DraftRound{3, 3}, DraftRound{3, 1}, DraftRound{2, 2}}) {
    sums.add(round);
  }
  EXPECT_EQ(sums.rounds, 4U);
  EXPECT_EQ(sums.drafted, 11U);
  EXPECT_EQ(sums.accepted, 6U);
  EXPECT_DOUBLE_EQ(sums.mean_accepted(), 1.5);
  EXPECT_EQ(sums.drafted_at, (std::vector<size_t>{4, 4, 3}));
  EXPECT_EQ(sums.accepted_at, (std::vector<size_t>{3, 2, 1}));
  EXPECT_EQ(sums.shares(), (std::vector<double>{0.75, 0.5, 1.0 / 3.0}));
}

}  // namespace
}  // namespace keyhole::tools

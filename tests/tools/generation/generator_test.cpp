// What ends an answer, and what of its text is shown.
#include "tools/generation/generator.h"

#include <gtest/gtest.h>

#include "tests/tools/generation/fake_decoder.h"

namespace keyhole::tools {
namespace {

using testing::FakeDecoder;
using testing::FakeTokenizer;

/// What an answer of scripted tokens comes to after a prompt of one token.
struct Shown {
  std::vector<uint32_t> tokens;
  std::vector<std::string> pieces;
  StopReason reason = StopReason::none;
  std::string text;
  std::vector<uint32_t> taken;
};

Shown run(const std::vector<uint32_t>& answer, const FakeTokenizer* tokenizer, const Stops& stops) {
  FakeDecoder decoder;
  decoder.script = {0};
  decoder.script.insert(decoder.script.end(), answer.begin(), answer.end());
  Sequence sequence(decoder);
  (void)sequence.bring_to(std::vector<uint32_t>{50});
  Sampler sampler({});
  Generator generator(sequence, sampler, tokenizer, stops);
  Shown shown;
  while (const auto piece = generator.next()) {
    shown.pieces.push_back(piece->text);
    shown.text += piece->text;
  }
  EXPECT_FALSE(generator.next());
  EXPECT_EQ(generator.text(), shown.text);
  shown.tokens = generator.tokens();
  shown.reason = generator.reason();
  shown.taken = decoder.taken;
  return shown;
}

const FakeTokenizer& words() {
  static const FakeTokenizer tokenizer(
      {"the ", "cat ", "sat", "\n", "User", ": ", "\xe2\x82", "\xac", "</s>"}, {8});
  return tokenizer;
}

TEST(Generator, EndsAtTheLengthOneTokenAheadOfTheSequence) {
  const Shown shown = run({0, 1, 2, 3}, &words(), {3, {8}, {}});
  EXPECT_EQ(shown.tokens, (std::vector<uint32_t>{0, 1, 2}));
  EXPECT_EQ(shown.text, "the cat sat");
  EXPECT_EQ(shown.reason, StopReason::length);
  EXPECT_EQ(shown.taken, (std::vector<uint32_t>{50, 0, 1}));
}

TEST(Generator, EndsAtAnEndTokenUnlessItIsIgnored) {
  const Shown shown = run({0, 8, 1, 2}, &words(), {4, {8}, {}});
  EXPECT_EQ(shown.tokens, (std::vector<uint32_t>{0, 8}));
  EXPECT_EQ(shown.text, "the ");
  EXPECT_EQ(shown.reason, StopReason::end_token);
  const Shown ignored = run({0, 8, 1, 2}, &words(), {4, {}, {}});
  EXPECT_EQ(ignored.text, "the cat sat");
  EXPECT_EQ(ignored.reason, StopReason::length);
}

TEST(Generator, EndsAtAStopTextThatTokensDivide) {
  const Shown shown = run({0, 1, 3, 4, 5, 2}, &words(), {10, {8}, {"\nUser:", "never"}});
  EXPECT_EQ(shown.tokens, (std::vector<uint32_t>{0, 1, 3, 4, 5}));
  EXPECT_EQ(shown.pieces, (std::vector<std::string>{"the ", "cat ", "", "", ""}));
  EXPECT_EQ(shown.reason, StopReason::text);
}

TEST(Generator, ShowsWhatBeganAStopTextAndDidNotBecomeOne) {
  const Shown shown = run({0, 3, 4, 2, 8}, &words(), {10, {8}, {"\nUser:"}});
  EXPECT_EQ(shown.pieces, (std::vector<std::string>{"the ", "", "", "\nUsersat", ""}));
  const Shown cut = run({0, 3, 4, 8}, &words(), {10, {8}, {"\nUser:"}});
  EXPECT_EQ(cut.pieces, (std::vector<std::string>{"the ", "", "", "\nUser"}));
}

TEST(Generator, ShowsNoHalfCharacter) {
  const Shown shown = run({0, 6, 7, 8}, &words(), {10, {8}, {}});
  EXPECT_EQ(shown.pieces, (std::vector<std::string>{"the ", "", "\xe2\x82\xac", ""}));
  EXPECT_EQ(run({0, 6, 8}, &words(), {10, {8}, {}}).text, "the ");
  EXPECT_EQ(run({0, 6}, &words(), {2, {8}, {}}).text, "the ");
}

TEST(Generator, GivesTokensAloneWithoutATokenizer) {
  const Shown shown = run({3, 1, 4}, nullptr, {3, {8}, {}});
  EXPECT_EQ(shown.tokens, (std::vector<uint32_t>{3, 1, 4}));
  EXPECT_EQ(shown.text, "");
}

TEST(Generator, GivesUpWithWhatItHeldBack) {
  FakeDecoder decoder;
  decoder.script = {0, 0, 3, 4, 5};
  Sequence sequence(decoder);
  (void)sequence.bring_to(std::vector<uint32_t>{50});
  Sampler sampler({});
  Generator generator(sequence, sampler, &words(), {10, {8}, {"\nUser:"}});
  for (int i = 0; i < 3; ++i) (void)generator.next();
  EXPECT_EQ(generator.text(), "the ");
  EXPECT_EQ(generator.give_up(), "\nUser");
  EXPECT_EQ(generator.text(), "the \nUser");
  EXPECT_EQ(generator.reason(), StopReason::none);
  EXPECT_FALSE(generator.next());
}

TEST(Generator, TheNextAnswerGoesOnFromTheFormer) {
  FakeDecoder decoder;
  Sequence sequence(decoder);
  (void)sequence.bring_to(std::vector<uint32_t>{50});
  Sampler sampler({});
  const Stops whole{6, {}, {}};
  Generator at_once(sequence, sampler, nullptr, whole);
  while (at_once.next()) {
  }
  const std::vector<uint32_t> expected = at_once.tokens();

  std::vector<uint32_t> said = {50};
  for (int turn = 0; turn < 2; ++turn) {
    (void)sequence.bring_to(said);
    Generator half(sequence, sampler, nullptr, {3, {}, {}});
    while (half.next()) {
    }
    said.insert(said.end(), half.tokens().begin(), half.tokens().end());
  }
  EXPECT_EQ(std::vector<uint32_t>(said.begin() + 1, said.end()), expected);
}

TEST(StopText, FindsTheFirstOfSeveral) {
  StopText stop({"", "bcd", "cx"});
  EXPECT_EQ(stop.push("aab"), "aa");
  EXPECT_EQ(stop.push("c"), "");
  EXPECT_EQ(stop.push("x..bcd"), "b");
  EXPECT_TRUE(stop.found());
  EXPECT_EQ(stop.push("more"), "");
  EXPECT_EQ(stop.finish(), "");
}

TEST(StopText, HoldsBackNoMoreThanMayBecomeOne) {
  StopText stop({"aab"});
  EXPECT_EQ(stop.push("xaaa"), "xa");
  EXPECT_EQ(stop.push("b"), "");
  EXPECT_TRUE(stop.found());
  StopText other({"aab"});
  EXPECT_EQ(other.push("aaa"), "a");
  EXPECT_EQ(other.finish(), "aa");
}

}  // namespace
}  // namespace keyhole::tools

#include "tools/generation/sequence.h"

#include <gtest/gtest.h>

#include <numeric>

#include "tests/tools/generation/fake_decoder.h"

namespace keyhole::tools {
namespace {

using testing::FakeDecoder;

std::vector<uint32_t> numbers(size_t count, uint32_t first = 0) {
  std::vector<uint32_t> tokens(count);
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

/// The token that the logits choose must be the one that these tokens lead to, however they came there.
void expect_at(const Sequence& sequence, const FakeDecoder& decoder,
               const std::vector<uint32_t>& tokens) {
  EXPECT_EQ(sequence.tokens(), tokens);
  EXPECT_EQ(decoder.taken, tokens);
  ASSERT_FALSE(sequence.logits().empty());
  EXPECT_EQ(greedy(sequence.logits()), decoder.after(tokens));
}

TEST(Sequence, PrefillsTheFirstPromptAndStepsOn) {
  FakeDecoder decoder;
  Sequence sequence(decoder);
  EXPECT_TRUE(sequence.logits().empty());
  std::vector<uint32_t> tokens = numbers(100);
  Sequence::Work work = sequence.bring_to(tokens);
  EXPECT_EQ(work.prefilled, 100U);
  EXPECT_EQ(work.reused + work.stepped + work.forgotten, 0U);
  expect_at(sequence, decoder, tokens);

  tokens.push_back(7);
  tokens.push_back(8);
  work = sequence.bring_to(tokens);
  EXPECT_EQ(work.reused, 100U);
  EXPECT_EQ(work.stepped, 2U);
  EXPECT_EQ(work.prefilled, 0U);
  EXPECT_EQ(decoder.prefills, 1);
  expect_at(sequence, decoder, tokens);
}

TEST(Sequence, ForgetsWhatTheNewPromptHasNot) {
  FakeDecoder decoder;
  Sequence sequence(decoder);
  (void)sequence.bring_to(numbers(100));
  std::vector<uint32_t> other = numbers(100);
  other[98] = 5;
  const Sequence::Work work = sequence.bring_to(other);
  EXPECT_EQ(work.reused, 98U);
  EXPECT_EQ(work.forgotten, 2U);
  EXPECT_EQ(work.stepped, 2U);
  expect_at(sequence, decoder, other);
  (void)sequence.bring_to(numbers(50));
  expect_at(sequence, decoder, numbers(50));
}

TEST(Sequence, TakesTheLastTokenAgainWhereItsLogitsAreGone) {
  FakeDecoder decoder;
  decoder.taken = numbers(100);
  Sequence sequence(decoder, numbers(100));
  Sequence::Work work = sequence.bring_to(numbers(100));
  EXPECT_EQ(work.reused, 99U);
  EXPECT_EQ(work.stepped, 1U);
  expect_at(sequence, decoder, numbers(100));
  work = sequence.bring_to(numbers(100));
  EXPECT_EQ(work.reused, 100U);
  EXPECT_EQ(work.stepped, 0U);
  EXPECT_EQ(decoder.steps, 1);
  expect_at(sequence, decoder, numbers(100));
}

TEST(Sequence, PrefillsAgainWhereThatIsLessWork) {
  FakeDecoder decoder;
  Sequence sequence(decoder);
  (void)sequence.bring_to(numbers(100));
  const std::vector<uint32_t> longer = numbers(200);
  const Sequence::Work work = sequence.bring_to(longer);
  EXPECT_EQ(work.prefilled, 200U);
  EXPECT_EQ(work.forgotten, 100U);
  EXPECT_EQ(decoder.steps, 0);
  expect_at(sequence, decoder, longer);
  (void)sequence.bring_to(numbers(30, 1));  // nothing in common
  expect_at(sequence, decoder, numbers(30, 1));
}

TEST(Sequence, PrefillsAgainWhereTheDecoderCannotGoBack) {
  FakeDecoder decoder;
  Sequence sequence(decoder);
  (void)sequence.bring_to(numbers(100));
  decoder.least_tokens = 98;
  std::vector<uint32_t> other = numbers(100);
  other[97] = 5;
  const Sequence::Work work = sequence.bring_to(other);
  EXPECT_EQ(work.prefilled, 100U);
  EXPECT_EQ(decoder.steps, 0);
  expect_at(sequence, decoder, other);
}

TEST(Sequence, IsWhatWasTakenWhereItIsStopped) {
  FakeDecoder decoder;
  Sequence sequence(decoder);
  struct Stop {};
  EXPECT_THROW((void)sequence.bring_to(numbers(100), [](double) { throw Stop{}; }), Stop);
  EXPECT_TRUE(sequence.tokens().empty());
  (void)sequence.bring_to(numbers(100));
  const auto stop_late = [](double fraction) {
    if (fraction >= 0.5) throw Stop{};
  };
  EXPECT_THROW((void)sequence.bring_to(numbers(104), stop_late), Stop);
  EXPECT_EQ(sequence.tokens(), numbers(102));
  EXPECT_EQ(decoder.taken, numbers(102));
  (void)sequence.bring_to(numbers(104));
  expect_at(sequence, decoder, numbers(104));
}

TEST(Sequence, TakesAsManyTokensTogetherAsTheDecoderCan) {
  FakeDecoder decoder;
  decoder.at_once = 4;
  Sequence sequence(decoder);
  (void)sequence.bring_to(numbers(400));
  std::vector<double> told;
  const Sequence::Work work =
      sequence.bring_to(numbers(409), [&](double fraction) { told.push_back(fraction); });
  EXPECT_EQ(work.reused, 400U);
  EXPECT_EQ(work.stepped, 9U);
  EXPECT_EQ(decoder.extensions, 2);
  EXPECT_EQ(decoder.steps, 1);  // of one token
  EXPECT_EQ(told, (std::vector<double>{0.0, 4.0 / 9.0, 8.0 / 9.0}));
  expect_at(sequence, decoder, numbers(409));
}

TEST(Sequence, TakesAllAnewWhereRopeChanges) {
  FakeDecoder decoder;
  decoder.original_context = 100;
  Sequence sequence(decoder);
  std::vector<uint32_t> tokens = numbers(99);
  (void)sequence.bring_to(tokens);
  const auto step = [&](uint32_t token) {
    (void)sequence.step(token);
    tokens.push_back(token);
    expect_at(sequence, decoder, tokens);
  };
  step(5);
  EXPECT_EQ(decoder.prefills, 1);
  step(6);  // the 101st
  EXPECT_EQ(decoder.prefills, 2);
  step(7);
  EXPECT_EQ(decoder.prefills, 2);
  // Cut back it is turned as a long one until it goes on, and then as what it is.
  sequence.truncate(90);
  tokens.resize(90);
  EXPECT_EQ(decoder.taken, tokens);
  step(8);
  EXPECT_EQ(decoder.prefills, 3);
  step(9);
  EXPECT_EQ(decoder.prefills, 3);
  // A prompt that has most of it in common.
  const Sequence::Work work = sequence.bring_to(numbers(90));
  EXPECT_EQ(work.stepped, 1U);
  const std::vector<uint32_t> beyond = numbers(101);
  EXPECT_EQ(sequence.bring_to(beyond).prefilled, 101U);
  EXPECT_EQ(sequence.bring_to(numbers(100)).prefilled, 100U);
}

TEST(Sequence, SaysThatItTakesAllAnew) {
  FakeDecoder decoder;
  decoder.original_context = 100;
  Sequence sequence(decoder);
  size_t told = 0;
  sequence.set_take_anew([&](std::span<const uint32_t> all) {
    (void)sequence.bring_to(all);
    told = all.size();
  });
  (void)sequence.bring_to(numbers(100));
  EXPECT_EQ(told, 0U);
  (void)sequence.step(3);
  EXPECT_EQ(told, 101U);
  (void)sequence.step(4);
  EXPECT_EQ(told, 101U);
  EXPECT_EQ(sequence.tokens().size(), 102U);
}

TEST(Sequence, RefusesNoTokensAndADecoderOfOthers) {
  FakeDecoder decoder;
  EXPECT_THROW(Sequence(decoder, numbers(3)), std::invalid_argument);
  Sequence sequence(decoder);
  EXPECT_THROW((void)sequence.bring_to({}), std::runtime_error);
}

}  // namespace
}  // namespace keyhole::tools

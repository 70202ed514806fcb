// Rounds of several prompts summed up by hand, and vocabularies that differ in one token.
#include "tools/commands/eval/draft_report.h"

#include <gtest/gtest.h>

#include <cmath>

#include "runtime/files/json.h"
#include "tests/tools/generation/fake_decoder.h"

namespace keyhole::tools {
namespace {

using nlohmann::json;

/// Two prompts, whose rounds accepted so many of 4.
DraftRow row_of(const char* index, DraftRole role, const std::vector<uint32_t>& one,
                const std::vector<uint32_t>& other) {
  DraftRow row;
  row.role = role;
  for (const std::vector<uint32_t>* rounds : {&one, &other}) {
    DraftedTokens& text = row.texts.emplace_back();
    for (const uint32_t accepted : *rounds) text.rounds.push_back({4, accepted});
    text.tokens = {1, 2, 3};
    row.as_plain.push_back({2, row.as_plain.empty() ? 0.125 : std::nan("")});
    EvalWay& way = row.runs.emplace_back();
    way.spec.text = index;
    way.times.steps = 1;
  }
  return row;
}

TEST(DraftReport, SumsRoundsAndComparesPrompts) {
  const DraftRow exact = row_of("exact", DraftRole::both, {4, 4}, {4});
  const DraftRow flat = row_of("flat", DraftRole::draft, {0, 3}, {2, 4, 0});
  EXPECT_EQ(flat.sums().rounds, 5U);
  EXPECT_DOUBLE_EQ(flat.sums().mean_accepted(), 9.0 / 5.0);
  EXPECT_EQ(flat.tokens(), 6U);
  EXPECT_EQ(flat.accepted_by_prompt(), (std::vector<double>{1.5, 2.0}));
  // Deviations from 1.8: their squares add up to 12.8, over 5 * 4.
  EXPECT_NEAR(flat.standard_error(), std::sqrt(12.8 / 20.0), 1e-12);
  EXPECT_FALSE(accepted_above(exact, exact));
  const auto above = accepted_above(flat, exact);
  ASSERT_TRUE(above);
  EXPECT_DOUBLE_EQ(above->mean, -2.25);  // 1.5 and 2 in the place of 4 and 4
  EXPECT_NEAR(above->error, 0.25, 1e-12);
}

TEST(DraftReport, JsonHasEveryRound) {
  const std::vector<DraftRow> rows = {row_of("exact", DraftRole::both, {4, 4}, {4}),
                                      row_of("flat", DraftRole::target, {0, 3}, {2, 4, 0})};
  const json document = draft_json(rows);
  ASSERT_EQ(document.size(), 2U);
  EXPECT_FALSE(document[0].contains("above_exact"));
  EXPECT_EQ(document[0]["of"], "both");
  const json& flat = document[1];
  EXPECT_EQ(flat["index"], "flat");
  EXPECT_EQ(flat["of"], "target");
  EXPECT_EQ(flat["rounds"], 5);
  EXPECT_EQ(flat["drafted"], 20);
  EXPECT_EQ(flat["accepted"], 9);
  EXPECT_DOUBLE_EQ(flat["tokens_per_pass"].get<double>(), 2.8);
  EXPECT_EQ(flat["accepted_by_place"], json({0.6, 0.6, 0.4, 0.2}));
  EXPECT_DOUBLE_EQ(flat["above_exact"]["mean_accepted"].get<double>(), -2.25);
  EXPECT_EQ(flat["texts"][1]["accepted"], json({2, 4, 0}));
  EXPECT_EQ(flat["texts"][0]["as_plain"], 2);
  EXPECT_EQ(flat["texts"][0]["margin"], 0.125);
  EXPECT_FALSE(flat["texts"][1].contains("margin"));
  const std::string text = draft_text(rows);
  for (const char* part : {"2.8", "60 60 40 20", "4/6", "target", "-2.25 +- 0.25",
                           "prompt 1: another token than plain decoding's after 2, where that "
                           "preferred its own by 0.125 nats"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << "\n" << text;
  }
}

TEST(DraftTokens, DifferInOneToken) {
  std::vector<std::string> texts(100);
  for (size_t i = 0; i < texts.size(); ++i) texts[i] = "t" + std::to_string(i);
  const testing::FakeTokenizer ours(texts, {7});
  EXPECT_EQ(token_difference(ours, testing::FakeTokenizer(texts, {7})), "");
  texts[42] = "\n\xFF";
  EXPECT_EQ(token_difference(testing::FakeTokenizer(texts, {7}), ours),
            "token 42 is \"\n\\xff\", not \"t42\"");
  texts[42] = "t42";
  EXPECT_EQ(token_difference(testing::FakeTokenizer(texts, {7, 8}), ours),
            "token 8 is a special one");
  EXPECT_EQ(token_difference(ours, testing::FakeTokenizer(texts, {7, 8})),
            "token 8 is not a special one");
}

}  // namespace
}  // namespace keyhole::tools

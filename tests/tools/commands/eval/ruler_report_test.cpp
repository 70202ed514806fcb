// Scores of several samples, worked out by hand.
#include "tools/commands/eval/ruler_report.h"

#include <gtest/gtest.h>

#include <cmath>

#include "runtime/files/json.h"

namespace keyhole::tools {
namespace {

EvalWay way_of(const char* index, double build, uint64_t steps, double attention) {
  EvalWay way;
  way.spec.text = index;
  way.build_seconds = build;
  way.scan_fraction = build > 2 ? std::nan("") : build / 10;
  way.times.steps = steps;
  way.times.attention = attention;
  return way;
}

/// Two ways, three samples; exact attention scores 100, 50 and 0 %, the index what is given.
RulerGroup group_of(const char* task, uint32_t length, std::vector<double> scores) {
  RulerGroup group;
  group.length = length;
  group.task = task;
  group.units = 17;
  group.references = {{"a"}, {"b", "c"}, {"d"}};
  RulerRow exact, index;
  exact.scores = {1.0, 0.5, 0.0};
  index.scores = std::move(scores);
  for (RulerRow* row : {&exact, &index}) {
    row->answers = {{"a", row->scores[0]}, {"b", row->scores[1]}, {"\xFF", row->scores[2]}};
    for (const double build : {1.0, 2.0, 3.0}) {
      row->runs.push_back(way_of(row == &exact ? "exact" : "flat", build, 10, 0.1 * build));
    }
  }
  group.rows = {exact, index};
  return group;
}

TEST(RulerReport, MeansOfRuns) {
  const EvalWay mean = mean_way(group_of("vt", 4096, {1, 1, 1}).rows[1].runs);
  EXPECT_EQ(mean.spec.text, "flat");
  EXPECT_DOUBLE_EQ(mean.build_seconds, 2.0);
  EXPECT_DOUBLE_EQ(mean.scan_fraction, 0.15);  // of the two that have one
  EXPECT_EQ(mean.times.steps, 30U);
  EXPECT_NEAR(mean.attention_ms(), 20.0, 1e-9);
  EXPECT_TRUE(std::isnan(mean_way({way_of("flat", 3, 1, 1)}).scan_fraction));
}

TEST(RulerReport, BitsOfANumberAreThoseOfAllPromptsTogether) {
  // 1,000 numbers in 16 bits and 9,000 in 4: 5.2 bits of each, and not the mean of both prompts, 10.
  EvalWay young = way_of("kivi4", 1, 1, 1), old = young;
  young.format_bits = old.format_bits = 4;
  young.format_bytes = 2000;
  young.format_bits_in_all = 16;
  old.format_bytes = 4500;
  old.format_bits_in_all = 4;
  for (const auto& runs : {std::vector{young, old}, std::vector{old, young}}) {
    const EvalWay mean = mean_way(runs);
    EXPECT_EQ(mean.format_bytes, 3250U);
    EXPECT_NEAR(mean.format_bits_in_all, 5.2, 1e-12);
    EXPECT_EQ(mean.format_bits, 4);
  }
  EXPECT_EQ(mean_way({way_of("flat", 1, 1, 1)}).format_bits_in_all, 0.0);
}

TEST(RulerReport, LostAndWonAreSamples) {
  const RulerGroup group = group_of("vt", 4096, {0.75, 0.5, 0.25});
  const auto swaps = score_swaps(group.rows[1], &group.rows[0]);
  ASSERT_TRUE(swaps.has_value());
  EXPECT_EQ(swaps->lost, 1U);
  EXPECT_EQ(swaps->won, 1U);
  EXPECT_FALSE(score_swaps(group.rows[1], nullptr).has_value());
}

TEST(RulerReport, TasksOfALengthHaveAMean) {
  const std::vector<RulerGroup> groups = {
      group_of("vt", 4096, {1, 1, 1}), group_of("cwe", 4096, {0, 0.5, 0}),
      group_of("vt", 8192, {0, 0, 0}), group_of("cwe", 8192, {0.3, 0.3, 0.3})};
  const std::vector<RulerGroup> means = mean_groups(groups);
  ASSERT_EQ(means.size(), 2U);
  EXPECT_EQ(means[0].task, "mean");
  EXPECT_EQ(means[0].length, 4096U);
  EXPECT_NEAR(means[0].rows[0].percent(), 50.0, 1e-9);
  EXPECT_NEAR(means[0].rows[1].percent(), (100 + 50.0 / 3) / 2, 1e-9);
  EXPECT_NEAR(means[1].rows[1].percent(), 15.0, 1e-9);
  const nlohmann::ordered_json report = ruler_json(means);
  ASSERT_EQ(report.size(), 4U);
  EXPECT_EQ(report[1]["length"], 4096);
  EXPECT_EQ(report[1]["samples"], 6);
  EXPECT_EQ(report[1]["lost"], 1);  // 1 -> 0
  EXPECT_EQ(report[1]["won"], 2);
  EXPECT_EQ(report[0]["lost"], 0);
  EXPECT_FALSE(report[0].contains("wrong"));
}

TEST(RulerReport, JsonListsWhatIsNotWhollyRight) {
  const nlohmann::ordered_json report = ruler_json({group_of("vt", 4096, {1, 0.5, 0})});
  ASSERT_EQ(report.size(), 2U);
  EXPECT_EQ(report[1]["index"], "flat");
  EXPECT_EQ(report[1]["task"], "vt");
  EXPECT_EQ(report[1]["score"], 50.0);
  EXPECT_EQ(report[1]["units"], 17);
  const nlohmann::ordered_json& wrong = report[1]["wrong"];
  ASSERT_EQ(wrong.size(), 2U);
  EXPECT_EQ(wrong[0]["sample"], 1);
  EXPECT_EQ(wrong[0]["references"], (std::vector<std::string>{"b", "c"}));
  EXPECT_EQ(wrong[0]["score"], 0.5);
  EXPECT_EQ(wrong[1]["answer"], "\\xff");

  const std::string text = ruler_text({group_of("vt", 4096, {1, 0.5, 0})});
  for (const char* part :
       {"length 4,096\n", "vt ", "mean ", "50 %", "0 / 0", "lost / won: samples"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << "\n" << text;
  }
}

TEST(RulerReport, QuestionsOfASampleAreOneSample) {
  // Two samples of two questions: what is lost is a sample, and each question has its own mean.
  RulerGroup group = group_of("turns", 4096, {0.75, 0.25, 0});
  group.turns = 2;
  group.references = {{"a"}, {"b"}, {"c"}, {"d"}};
  RulerRow& exact = group.rows[0];
  RulerRow& index = group.rows[1];
  exact.scores = {1.0, 0.5};
  exact.answers = {{"a", 1, 100}, {"b", 1, 20}, {"c", 1, 110}, {"x", 0, 30}};
  index.scores = {0.5, 0.5};
  index.answers = {{"a", 1, 100}, {"y", 0, 20}, {"c", 1, 110}, {"x", 0, 30}};
  const std::vector<TurnMean> means = turn_means(group, index);
  ASSERT_EQ(means.size(), 2U);
  EXPECT_EQ(means[0].percent, 100.0);
  EXPECT_EQ(means[1].percent, 0.0);
  EXPECT_EQ(means[0].taken, 105.0);
  EXPECT_EQ(means[1].taken, 25.0);
  EXPECT_EQ(turn_means(group, exact)[1].percent, 50.0);

  const nlohmann::ordered_json report = ruler_json({group});
  EXPECT_EQ(report[1]["samples"], 2);
  EXPECT_EQ(report[1]["lost"], 1);
  EXPECT_EQ(report[1]["score"], 50.0);
  ASSERT_EQ(report[1]["questions"].size(), 2U);
  EXPECT_EQ(report[1]["questions"][1]["score"], 0.0);
  EXPECT_EQ(report[1]["questions"][1]["taken"], 25.0);
  const nlohmann::ordered_json& wrong = report[1]["wrong"];
  ASSERT_EQ(wrong.size(), 2U);
  EXPECT_EQ(wrong[0]["sample"], 0);
  EXPECT_EQ(wrong[0]["question"], 2);
  EXPECT_EQ(wrong[1]["sample"], 1);
  EXPECT_EQ(wrong[1]["references"], std::vector<std::string>{"d"});
  EXPECT_FALSE(ruler_json({group_of("vt", 4096, {1, 1, 1})})[1].contains("questions"));
  const std::string text = ruler_text({group});
  EXPECT_NE(text.find("turns, score of question"), std::string::npos) << text;
}

}  // namespace
}  // namespace keyhole::tools

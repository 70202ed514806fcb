#include "tools/commands/compare/advice.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "runtime/files/json.h"
#include "tests/temporary_folder.h"

namespace keyhole::tools {
namespace {

constexpr size_t kKeys = 1000;

Summary summary_of(const std::string& index, double error, double us, double bytes_per_key) {
  Summary s;
  s.heads = 2;
  s.mean.index = s.mean.series = index;
  s.mean.attend = "topk:100";
  s.mean.tail = s.mean.target = "none";
  s.mean.output_error = OutputError{};
  s.mean.output_error->median = error;
  s.mean.latency_us.p50 = us;
  s.memory_per_key_total = bytes_per_key;
  return s;
}

std::vector<Goal> goals_of(const std::vector<std::string>& texts) { return parse_goals(texts); }

TEST(Advice, ReadsGoals) {
  EXPECT_EQ(parse_goal("error=0.05").most, 0.05);
  EXPECT_EQ(parse_goal("latency=60us").most, 60);
  EXPECT_EQ(parse_goal("latency=1.5ms").most, 1500);
  EXPECT_EQ(parse_goal("latency=2s").most, 2e6);
  EXPECT_EQ(parse_goal("memory=4GiB").most, 4.0 * (1 << 30));
  for (const char* bad :
       {"", "error", "error=", "error=x", "error=0", "error=-1", "error=nan", "error=1%",
        "latency=60", "latency=60h", "latency=us", "memory=", "memory=0", "speed=1"}) {
    EXPECT_NE(error_of([&] { (void)parse_goal(bad); }).find("--goal " + std::string(bad)),
              std::string::npos)
        << bad;
  }
  EXPECT_NE(error_of([] {
              (void)goals_of({"error=1", "error=2"});
            }).find("one kind"),
            std::string::npos);
}

// Against the definition, over random figures.
TEST(Advice, IsTheBestOfThoseThatReachTheGoals) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  std::uniform_real_distribution<double> unit(0.01, 1);
  for (int round = 0; round < 500; ++round) {
    std::vector<Summary> summaries;
    std::vector<std::string> indexes;
    for (size_t i = 0; i < 1 + random() % 6; ++i) {
      const std::string name = "ivf:probe=" + std::to_string(i);
      summaries.push_back(summary_of(name, unit(random), 100 * unit(random), 10 * unit(random)));
      if (i == 0 || random() % 4 != 0) indexes.push_back(name);  // the others are rivals
    }
    std::vector<std::string> texts;
    const bool by_error = random() % 2 == 0;
    const bool by_time = random() % 2 == 0;
    const bool by_memory = (!by_error && !by_time) || random() % 2 == 0;
    if (by_error) texts.push_back("error=" + std::to_string(unit(random)));
    if (by_time) texts.push_back("latency=" + std::to_string(100 * unit(random)) + "us");
    if (by_memory)
      texts.push_back("memory=" + std::to_string(static_cast<int>(1e4 * unit(random))));
    const std::vector<Goal> goals = goals_of(texts);
    const auto advice = advise(summaries, goals, indexes, kKeys);
    ASSERT_TRUE(advice);

    const Summary* expected = nullptr;
    double expected_worth = 0;
    bool any = false;
    for (const bool reaching : {true, false}) {
      if (!reaching && any) break;
      for (const Summary& s : summaries) {
        bool known = false;
        for (const std::string& i : indexes) known = known || i == s.mean.index;
        if (!known) continue;
        double worst = 0;
        for (const Goal& g : goals) {
          const double figure = g.of == Goal::Of::error     ? s.mean.output_error->median
                                : g.of == Goal::Of::latency ? s.mean.latency_us.p50
                                                            : s.memory_per_key_total * kKeys;
          worst = std::max(worst, figure / g.most);
        }
        if (reaching && worst > 1) continue;
        any = any || reaching;
        const double worth = !reaching               ? worst
                             : !by_error             ? s.mean.output_error->median
                             : by_time && !by_memory ? s.memory_per_key_total
                                                     : s.mean.latency_us.p50;
        if (expected == nullptr || worth < expected_worth) {
          expected = &s;
          expected_worth = worth;
        }
      }
    }
    ASSERT_NE(expected, nullptr);
    EXPECT_EQ(advice->chosen.mean.index, expected->mean.index);
    EXPECT_EQ(advice->reached, any);
    EXPECT_EQ(advice->candidates, indexes.size());
    EXPECT_EQ(advice->reaching == 0, !any);
    const std::string text = to_text(*advice);
    EXPECT_EQ(text.find("nothing that was measured") != std::string::npos, !any) << text;
    EXPECT_NE(text.find("--index " + expected->mean.index + " --attend topk:100\n"),
              std::string::npos)
        << text;
    EXPECT_EQ(to_json(*advice)["index"], expected->mean.index);
  }
}

TEST(Advice, IsNothingWithoutGoalsOrIndexes) {
  const std::vector<Summary> summaries = {summary_of("pages", 0.1, 10, 1)};
  EXPECT_FALSE(advise(summaries, {}, {"pages"}, kKeys));
  EXPECT_FALSE(advise(summaries, goals_of({"error=1"}), {}, kKeys));
}

TEST(Advice, QuotesWhatAShellWouldRead) {
  Advice advice;
  advice.chosen = summary_of("ivf:probe=4", 0.1, 10, 1);
  advice.chosen.mean.tail = "second:16";
  advice.chosen.mean.target = "error=0.05,min=2";
  EXPECT_EQ(advice.options(),
            "--index ivf:probe=4 --attend topk:100 --tail second:16 --target error=0.05,min=2");
  advice.chosen.mean.index = "a|b";
  EXPECT_EQ(advice.options().substr(0, 13), "--index 'a|b'");
}

}  // namespace
}  // namespace keyhole::tools

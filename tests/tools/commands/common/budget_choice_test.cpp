// --tail and --target: what they take, what they refuse, how they are crossed.
#include "tools/commands/common/budget_choice.h"

#include <gtest/gtest.h>

#include "tools/terminal/errors.h"

namespace keyhole::tools {
namespace {

TEST(TailChoice, ReadsWhatItWrites) {
  for (const char* text : {"none", "mean", "centroid", "second", "mean:4", "second:1024"}) {
    EXPECT_EQ(parse_tail(text).text(), text);
  }
  EXPECT_EQ(parse_tail("second:32").mode, KEYHOLE_TAIL_SECOND);
  EXPECT_EQ(parse_tail("second:32").keys_per_partition, 32U);
  for (const char* text : {"", "third", "none:16", "mean:", "mean:3", "mean:1025", "mean:16x",
                           "mean:-16", "second:99999999999", " mean"}) {
    EXPECT_THROW((void)parse_tail(text), UsageError) << text;
  }
}

TEST(TargetChoice, ReadsWhatItWrites) {
  for (const char* text : {"none", "error=0.05", "mass=0.9", "error=0.05,mass=0.9",
                           "error=0.1,min=5,max=70", "mass=0.5,max=4294967295"}) {
    EXPECT_EQ(parse_target(text).text(), text);
  }
  for (const char* text :
       {"", "error", "error=", "error=0", "error=1", "error=-0.1", "error=nan", "error=0.1,",
        "error=0.1,error=0.2", "mass=2", "min=5", "max=5,min=1", "error=0.1,min=0",
        "error=0.1,min=8,max=7", "error=0.1x", "none,mass=0.5"}) {
    EXPECT_THROW((void)parse_target(text), UsageError) << text;
  }
}

TEST(BudgetChoice, CrossesTheTargetFirst) {
  const auto attends = parse_attends({"topk:5", "scored"}, 100);
  const auto all = cross_budgets(attends, {"none", "second:32"}, {"none", "error=0.1"});
  ASSERT_EQ(all.size(), 8U);
  const char* texts[] = {
      "topk:5", "topk:5 error=0.1", "topk:5 tail=second:32", "topk:5 tail=second:32 error=0.1",
      "scored", "scored error=0.1", "scored tail=second:32", "scored tail=second:32 error=0.1"};
  for (size_t i = 0; i < all.size(); ++i) {
    EXPECT_EQ(all[i].text(), texts[i]);
    EXPECT_EQ(all[i].needs_partitions(), i % 4 != 0);
  }
  // A target without a tail reads the partitions that the tails have.
  EXPECT_EQ(all[1].tail.keys_per_partition, 32U);
  EXPECT_EQ(common_partition(all), 32U);
  EXPECT_EQ(cross_budgets(attends, {}, {}).size(), 2U);
  EXPECT_THROW((void)cross_budgets(attends, {"mean", "mean"}, {}), UsageError);
  EXPECT_THROW((void)cross_budgets(attends, {}, {"error=0.1", "error=0.10"}), UsageError);
  EXPECT_THROW((void)common_partition(cross_budgets(attends, {"mean:8", "mean:16"}, {})),
               UsageError);
}

TEST(BudgetChoice, NumbersOfKeysAreOfTailsWithoutATarget) {
  const auto attends = parse_attends({"topk:5"}, 100);
  const auto crossed = cross_budgets(attends, {"none", "second", "codes"}, {"none", "error=0.1"});
  BudgetNumbers numbers;
  EXPECT_EQ(with_numbers(crossed, numbers), crossed);
  numbers.min_keys = {16, 32};
  numbers.max_keys = {64};
  const auto all = with_numbers(crossed, numbers);
  std::vector<std::string> texts;
  for (const BudgetChoice& choice : all) texts.push_back(choice.text());
  EXPECT_EQ(texts, (std::vector<std::string>{
                       "topk:5", "topk:5 error=0.1", "topk:5 tail=second min=16 max=64",
                       "topk:5 tail=second min=32 max=64", "topk:5 tail=second error=0.1",
                       "topk:5 tail=codes", "topk:5 tail=codes error=0.1"}));
  EXPECT_EQ(all[3].budget().min_keys, 32U);
  EXPECT_EQ(all[3].budget().max_keys, 64U);
  numbers.max_keys = {31};
  EXPECT_THROW((void)with_numbers(crossed, numbers), UsageError);
  EXPECT_THROW((void)with_numbers(cross_budgets(attends, {}, {}), numbers), UsageError);
}

TEST(BudgetChoice, ExactRowsAreOfCodes) {
  BudgetNumbers numbers;
  const auto crossed = cross_budgets(parse_attends({"topk"}, 100), {}, {});
  const auto with_rows = [&](std::optional<uint32_t> rows, const std::string& spec) {
    numbers.exact_rows = rows;
    return for_index(with_numbers(crossed, numbers).front(), spec).budget();
  };
  EXPECT_EQ(with_rows({}, "codes").top_k, 16U);
  EXPECT_EQ(with_rows(40, "codes").top_k, 40U);
  EXPECT_EQ(with_rows(40, "codes").tail, KEYHOLE_TAIL_CODES);
  EXPECT_EQ(with_rows(40, "flat").top_k, 100U);
  EXPECT_EQ(with_rows(0, "codes").attend, KEYHOLE_ATTEND_NONE);
  EXPECT_EQ(with_rows(0, "flat").attend, KEYHOLE_ATTEND_TOPK);
}

TEST(BudgetChoice, ComesBackFromABudget) {
  for (const char* tail : {"none", "second", "codes"}) {
    for (const char* attend : {"topk:7", "scored", "weight:0.01"}) {
      for (const char* target : {"none", "error=0.1,min=3,max=9", "mass=0.5"}) {
        const BudgetChoice choice =
            cross_budgets(parse_attends({attend}, 70), {tail}, {target}).front();
        const BudgetChoice back = choice_of(choice.budget());
        EXPECT_EQ(back.text(), choice.text());
        for (const Setting& row : kBudgetSettings) {
          const keyhole_budget a = back.budget();
          const keyhole_budget b = choice.budget();
          EXPECT_TRUE(same_number(row, &a, &b)) << row.name;
        }
      }
    }
  }
}

TEST(BudgetChoice, BecomesABudgetAndOptions) {
  const BudgetChoice choice = cross_budgets(parse_attends({"weight:0.01"}, 70), {"centroid"},
                                            {"error=0.1,mass=0.8,min=3,max=9"})
                                  .front();
  const keyhole_budget b = choice.budget();
  const keyhole_search_options o = choice.search_options();
  EXPECT_EQ(b.top_k, 70U);
  EXPECT_EQ(o.budget.top_k, 70U);
  EXPECT_EQ(b.attend, KEYHOLE_ATTEND_WEIGHT);
  EXPECT_EQ(o.budget.attend, b.attend);
  EXPECT_EQ(b.min_weight, 0.01F);
  EXPECT_EQ(o.budget.min_weight, b.min_weight);
  EXPECT_EQ(b.tail, KEYHOLE_TAIL_CENTROID);
  EXPECT_EQ(o.budget.tail, b.tail);
  EXPECT_EQ(b.error_target, 0.1F);
  EXPECT_EQ(o.budget.error_target, b.error_target);
  EXPECT_EQ(b.mass_target, 0.8F);
  EXPECT_EQ(o.budget.mass_target, b.mass_target);
  EXPECT_EQ(b.min_keys, 3U);
  EXPECT_EQ(o.budget.min_keys, 3U);
  EXPECT_EQ(b.max_keys, 9U);
  EXPECT_EQ(o.budget.max_keys, 9U);
}

}  // namespace
}  // namespace keyhole::tools

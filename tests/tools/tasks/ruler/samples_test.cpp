// Samples fill a length and never exceed it.
#include "tools/tasks/ruler/samples.h"

#include <algorithm>
#include <utility>

#include "tests/temporary_folder.h"
#include "tests/tools/tasks/ruler/ruler_samples.h"
#include "tools/tasks/ruler/draws.h"
#include "tools/terminal/errors.h"

namespace keyhole::tools::ruler {
namespace {

/// Prompts of 20 words and 7 for each unit, and of `extra` more where the list has some for this draw.
class Counted : public Generator {
 public:
  explicit Counted(std::vector<size_t> extra = {}) : extra_(std::move(extra)) {}
  [[nodiscard]] SizeSearch size_search() const override { return {.step = 10, .probe = 10}; }
  [[nodiscard]] Sample draw(size_t index, size_t units) override {
    const size_t more = drawn_ < extra_.size() ? extra_[drawn_] : 0;
    ++drawn_;
    Sample sample;
    for (size_t i = 0; i < 20 + 7 * units + more; ++i) sample.prompt += "w ";
    sample.references = {std::to_string(index), std::to_string(units)};
    return sample;
  }

 private:
  std::vector<size_t> extra_;
  size_t drawn_ = 0;
};

size_t word_count(const Sample& sample) {
  return words_in(sample.prompt).size() + words_in(sample.prefix).size();
}

TEST(RulerSamples, FindTheMostUnits) {
  for (const size_t budget : {90U, 96U, 97U, 1000U, 12345U}) {
    Counted generator;
    EXPECT_EQ(find_units(generator, budget, word_count), (budget - 20) / 7) << budget;
    Samples samples(std::make_unique<Counted>(), budget, word_count);
    EXPECT_EQ(samples.units(), (budget - 20) / 7);
    for (size_t i = 0; i < 3; ++i) {
      EXPECT_EQ(samples.next().references,
                (std::vector<std::string>{std::to_string(i), std::to_string((budget - 20) / 7)}));
    }
  }
  EXPECT_EQ(error_of([] { Samples(std::make_unique<Counted>(), 89, word_count); }),
            "the prompt with the smallest haystack has 90 tokens; allowed: 89, the length without "
            "the tokens of an answer");
}

TEST(RulerSamples, TakeStepsBackWhereADrawIsTooLong) {
  // The search draws some samples; all of those behind it are 100 tokens longer.
  Counted probe;
  size_t searched = 0;
  (void)find_units(probe, 1000, [&searched](const Sample& sample) {
    ++searched;
    return word_count(sample);
  });
  std::vector<size_t> extra(searched, 0);
  extra.insert(extra.end(), 50, 100);
  Samples samples(std::make_unique<Counted>(extra), 1000, word_count);
  EXPECT_EQ(samples.units(), 140U);
  EXPECT_EQ(samples.next().references.back(),
            "120");  // 20 + 7 * 120 + 100 <= 1000 < 20 + 7 * 130 + 100
  // Never fewer than a step; a sample that cannot fit ends with the numbers.
  extra.resize(searched);
  extra.insert(extra.end(), 500, 1000);
  Samples none(std::make_unique<Counted>(extra), 1000, word_count);
  EXPECT_EQ(error_of([&] { (void)none.next(); }),
            "the prompt with the smallest haystack has 1090 tokens; allowed: 1000, the length "
            "without the tokens of an answer");
}

TEST(RulerSamples, OfEveryTaskKeepTheBudgetAndUseIt) {
  for (const TaskInfo& task : all_tasks()) {
    if (task.needs == Needs::squad || task.needs == Needs::hotpot_qa) continue;
    SCOPED_TRACE(task.name);
    TaskSetup setup = setup_of(4096);
    setup.samples = 5;
    const size_t budget = 4096 - task.answer_tokens;
    Samples samples(task.make(setup), budget, word_count);
    Samples again(task.make(setup), budget, word_count);
    for (int i = 0; i < 5; ++i) {
      const Sample sample = samples.next();
      EXPECT_LE(word_count(sample), budget);
      EXPECT_GT(word_count(sample), budget - (task.name == "fwe" ? 250 : 100));
      EXPECT_FALSE(sample.references.empty());
      EXPECT_EQ(again.next().prompt, sample.prompt);
    }
  }
}

TEST(RulerSamples, OfTurnsUseTheLengthWhateverTheirQuestionsTake) {
  const TaskInfo& task = *find_task("turns");
  // Words of all that a session takes, and so many tokens that a chat template puts around each question.
  for (const size_t around : {0U, 20U, 60U}) {
    const auto count = [around](const Sample& sample) {
      size_t tokens = around + word_count(sample) + words_in(sample.answer).size();
      for (const FollowUp& next : sample.follow_ups) {
        tokens += around + words_in(next.prompt + next.prefix + next.answer).size();
      }
      return tokens;
    };
    for (const size_t budget : {4000U, 32000U}) {
      SCOPED_TRACE(std::to_string(around) + " around, " + std::to_string(budget));
      Samples samples(task.make(setup_of(static_cast<uint32_t>(budget))), budget, count);
      const size_t tokens = count(samples.next());
      EXPECT_LE(tokens, budget);
      EXPECT_GT(tokens, budget - 100);
    }
  }
}

TEST(RulerTasks, AreThoseOfTheBenchmarks) {
  std::vector<std::string> names;
  for (const TaskInfo& task : all_tasks()) names.emplace_back(task.name);
  EXPECT_EQ(names, (std::vector<std::string>{"niah_single_1",
                                             "niah_single_2",
                                             "niah_single_3",
                                             "niah_multikey_1",
                                             "niah_multikey_2",
                                             "niah_multikey_3",
                                             "niah_multivalue",
                                             "niah_multiquery",
                                             "vt",
                                             "cwe",
                                             "fwe",
                                             "qa_1",
                                             "qa_2",
                                             "infinitebench_passkey",
                                             "infinitebench_number",
                                             "infinitebench_kv",
                                             "turns",
                                             "records",
                                             "enumerate",
                                             "mqar"}));
  EXPECT_EQ(find_task("vt")->answer_tokens, 30U);
  EXPECT_EQ(find_task("cwe")->answer_tokens, 120U);
  EXPECT_EQ(find_task("fwe")->answer_tokens, 50U);
  EXPECT_EQ(find_task("qa_1")->answer_tokens, 32U);
  EXPECT_EQ(find_task("niah_multivalue")->answer_tokens, 128U);
  EXPECT_EQ(find_task("vts"), nullptr);
}

TEST(RulerDraws, AreWithoutRepetition) {
  Random random(7);
  std::vector<size_t> counts(5);
  for (int i = 0; i < 1000; ++i) {
    std::vector<size_t> drawn = distinct(random, 3, 5);
    for (const size_t one : drawn) ++counts.at(one);
    std::sort(drawn.begin(), drawn.end());
    EXPECT_EQ(std::adjacent_find(drawn.begin(), drawn.end()), drawn.end());
  }
  for (const size_t count : counts) EXPECT_NEAR(static_cast<double>(count), 600.0, 100.0);
  std::vector<size_t> all = distinct(random, 100, 100);
  std::sort(all.begin(), all.end());
  for (size_t i = 0; i < 100; ++i) EXPECT_EQ(all[i], i);
}

TEST(RulerDraws, FillTemplatesInOnePass) {
  EXPECT_EQ(filled("{a} {b} {c} {a", {{"a", "{b}"}, {"b", "x"}}), "{b} x {c} {a");
  EXPECT_EQ(replaced("are all are", "are", "is"), "is all is");
  EXPECT_EQ(replaced("aaa", "aa", "b"), "ba");
}

}  // namespace
}  // namespace keyhole::tools::ruler

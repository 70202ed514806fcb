// Tasks with several facts: what is asked can be found, followed and counted in the context, by another way than it
// was made.
#include "tools/tasks/ruler_task.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <sstream>

#include "tests/temporary_folder.h"
#include "tools/terminal/errors.h"

namespace keyhole::tools {
namespace {

std::string prose() {
  std::string text;
  for (int i = 0; i < 200; ++i)
    text += "the quick brown fox saw dog number " + std::to_string(i) + ". ";
  return text;
}

size_t count(const std::string& text, const std::string& part) {
  size_t n = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++n;
  return n;
}

Task make(RulerKind kind, size_t bytes, size_t questions, uint64_t seed) {
  const std::string haystack = prose();
  return make_ruler_task({.kind = kind,
                          .context_bytes = bytes,
                          .questions = questions,
                          .seed = seed,
                          .haystack = haystack});
}

TEST(RulerTask, NeedlesAreInSentencesOfTheirOwn) {
  const Task task = make(RulerKind::needles, 9000, 8, 3);
  EXPECT_EQ(task.context.size(), 9000U);
  ASSERT_EQ(task.questions.size(), 8U);
  for (const Question& question : task.questions) {
    ASSERT_EQ(question.values.size(), kRulerNeedles);
    EXPECT_EQ(question.answer, "");
    const size_t at = question.prompt.find("numbers of ") + 11;
    const std::string name = question.prompt.substr(at, 6);
    EXPECT_NE(question.spoken.find(name), std::string::npos);
    for (const std::string& value : question.values) {
      EXPECT_EQ(
          count(task.context, "\n[One of the magic numbers of " + name + " is " + value + ".]\n"),
          1U);
    }
  }
}

TEST(RulerTask, ChainsOfVariablesLeadToTheNumber) {
  const Task task = make(RulerKind::variables, 8192, 8, 4);
  EXPECT_EQ(task.context.size(), 8192U);
  // Every assignment of the text, resolved in one pass: what a variable is assigned from was assigned above it.
  std::map<std::string, std::string> values;
  std::istringstream lines(task.context);
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with("VAR ")) continue;
    const std::string name = line.substr(4, 5);
    const std::string value = line.substr(12);
    EXPECT_FALSE(values.contains(name));
    if (value.starts_with("VAR ")) {
      ASSERT_TRUE(values.contains(value.substr(4))) << line;
      values[name] = values.at(value.substr(4));
    } else {
      values[name] = value;
    }
  }
  EXPECT_EQ(values.size(), 8 * kRulerChain);
  for (const Question& question : task.questions) {
    const std::string number = question.prompt.substr(question.prompt.find("the value ") + 10, 5);
    std::vector<std::string> expected;
    for (const auto& [name, value] : values) {
      if (value == number) expected.push_back(name);
    }
    std::vector<std::string> asked = question.values;
    std::sort(asked.begin(), asked.end());
    EXPECT_EQ(asked, expected);
    EXPECT_NE(question.spoken.find(number), std::string::npos);
  }
}

TEST(RulerTask, FrequentWordsAreTwiceAsFrequentAsOthers) {
  const Task task = make(RulerKind::words, 20000, 4, 5);
  EXPECT_LE(task.context.size(), 20000U);
  EXPECT_GT(task.context.size(), 19900U);
  std::map<std::string, std::map<std::string, size_t>> lists;
  std::istringstream lines(task.context);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line.substr(7));
    for (std::string word; words >> word;) ++lists[line.substr(0, 6)][word];
  }
  EXPECT_EQ(lists.size(), 4U);
  for (const Question& question : task.questions) {
    const auto& counts =
        lists.at(question.prompt.substr(question.prompt.find("frequent of ") + 12, 6));
    size_t least = SIZE_MAX;
    for (const std::string& word : question.values) least = std::min(least, counts.at(word));
    for (const auto& [word, n] : counts) {
      if (std::find(question.values.begin(), question.values.end(), word) ==
          question.values.end()) {
        EXPECT_GE(least, 2 * n) << word;
      }
    }
    EXPECT_GT(counts.size(), 10U);
  }
}

TEST(RulerTask, IsTheSameForASeedAndRefusesTooManyQuestions) {
  for (const RulerKind kind : {RulerKind::needles, RulerKind::variables, RulerKind::words}) {
    EXPECT_EQ(make(kind, 4096, 4, 1).context, make(kind, 4096, 4, 1).context);
    EXPECT_NE(make(kind, 4096, 4, 1).context, make(kind, 4096, 4, 2).context);
    EXPECT_NE(error_of([&] { (void)make(kind, 4095, 4, 1); }).find("allowed: 1 to 3"),
              std::string::npos);
    EXPECT_THROW((void)make(kind, 4096, 0, 1), UsageError);
  }
  EXPECT_THROW((void)make_ruler_task({.kind = RulerKind::needles,
                                      .context_bytes = 4096,
                                      .questions = 1,
                                      .seed = 1,
                                      .haystack = ""}),
               UsageError);
}

}  // namespace
}  // namespace keyhole::tools

// The kv task: its lines are well-formed, and its answers follow from them.
#include "tools/tasks/kv_task.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <map>
#include <set>
#include <sstream>

#include "tools/terminal/errors.h"

namespace keyhole::tools {
namespace {

/// Reads the context as a person would: pairs in order, every pointer to a line above.
std::map<std::string, std::string> parse(const std::string& context) {
  std::map<std::string, std::string> pairs;
  std::istringstream lines(context);
  std::string line;
  while (std::getline(lines, line)) {
    const std::string key = line.substr(0, 5);
    for (const char c : key) EXPECT_TRUE(std::islower(static_cast<unsigned char>(c))) << line;
    EXPECT_EQ(line.at(5), '=') << line;
    const std::string value = line.substr(6);
    if (value.at(0) == '@') {
      EXPECT_EQ(value.size(), 6U) << line;
      EXPECT_EQ(pairs.count(value.substr(1)), 1U) << line << " points nowhere above";
    } else {
      EXPECT_EQ(value.size(), 5U) << line;
      for (const char c : value) EXPECT_TRUE(std::isdigit(static_cast<unsigned char>(c))) << line;
    }
    EXPECT_TRUE(pairs.emplace(key, value).second) << key << " occurs twice";
  }
  return pairs;
}

std::string follow(const std::map<std::string, std::string>& pairs, const std::string& key) {
  const std::string& value = pairs.at(key);
  return value[0] == '@' ? value + "=" + follow(pairs, value.substr(1)) : value;
}

TEST(KvTask, AnswersFollowFromTheLinesForManySizesAndSeeds) {
  for (uint64_t seed = 0; seed < 40; ++seed) {
    const size_t bytes = 12 + 97 * seed;
    const size_t questions = 1 + seed % (bytes / 13 + 1);
    SCOPED_TRACE(::testing::Message() << "seed " << seed << ", " << bytes << " bytes");
    const Task task = make_kv_task({.context_bytes = bytes, .questions = questions, .seed = seed});
    EXPECT_LE(task.context.size(), bytes);
    EXPECT_GT(task.context.size() + 13, bytes);
    EXPECT_EQ(task.context.back(), '\n');
    const auto pairs = parse(task.context);
    ASSERT_EQ(task.questions.size(), questions);
    std::set<std::string> asked;
    for (const Question& question : task.questions) {
      ASSERT_EQ(question.prompt.size(), kKvQuestionBytes);
      EXPECT_EQ(question.prompt.front(), '?');
      EXPECT_EQ(question.prompt.back(), '=');
      const std::string key = question.prompt.substr(1, 5);
      EXPECT_TRUE(asked.insert(key).second) << key << " is asked twice";
      EXPECT_EQ(question.answer, follow(pairs, key) + "\n");
      EXPECT_EQ(question.answer.find('\n'), question.answer.size() - 1);
    }
  }
}

TEST(KvTask, HasItsShareOfPointersAndChains) {
  const Task task = make_kv_task({.context_bytes = 120000, .questions = 5000, .seed = 4});
  const auto pairs = parse(task.context);
  size_t pointers = 0;
  for (const auto& [key, value] : pairs) pointers += value[0] == '@' ? 1 : 0;
  EXPECT_NEAR(static_cast<double>(pointers) / static_cast<double>(pairs.size()), 0.18, 0.02);
  size_t chains = 0;
  for (const Question& question : task.questions) {
    if (std::count(question.answer.begin(), question.answer.end(), '@') > 1) ++chains;
  }
  EXPECT_GT(chains, 50U);  // about 3 %
}

TEST(KvTask, AsksAboutTheWholeContextEvenly) {
  const Task task = make_kv_task({.context_bytes = 120000, .questions = 1000, .seed = 5});
  std::vector<int> quarter(4, 0);
  for (const Question& question : task.questions) {
    const size_t at = task.context.find(question.prompt.substr(1));
    ++quarter[at * 4 / task.context.size()];
  }
  for (const int count : quarter) EXPECT_NEAR(count, 250, 80);
}

TEST(KvTask, IsTheSameForTheSameSeedOnly) {
  const KvTaskOptions options{.context_bytes = 1000, .questions = 8, .seed = 6};
  const Task first = make_kv_task(options);
  const Task again = make_kv_task(options);
  EXPECT_EQ(first.context, again.context);
  for (size_t i = 0; i < 8; ++i) EXPECT_EQ(first.questions[i].answer, again.questions[i].answer);
  KvTaskOptions other = options;
  other.seed = 7;
  EXPECT_NE(make_kv_task(other).context, first.context);
  // Guards the promise "on every platform": a change of these bytes changes everybody's results.
  EXPECT_EQ(first.context.substr(0, 24), "svykj=00272\nvtydl=@svykj");
}

TEST(KvTask, RefusesWhatCannotBe) {
  EXPECT_THROW((void)make_kv_task({.context_bytes = 11, .questions = 1}), UsageError);
  EXPECT_THROW((void)make_kv_task({.context_bytes = (size_t{1} << 26) + 1}), UsageError);
  EXPECT_THROW((void)make_kv_task({.context_bytes = 120, .questions = 0}), UsageError);
  EXPECT_THROW((void)make_kv_task({.context_bytes = 120, .questions = 11}), UsageError);
  EXPECT_EQ(make_kv_task({.context_bytes = 12, .questions = 1}).context.size(), 12U);
}

TEST(KvTask, HasAtLeastTheLinesThatItPromises) {
  for (size_t bytes = 13; bytes < 2000; bytes += 61) {
    EXPECT_NO_THROW((void)make_kv_task({.context_bytes = bytes, .questions = min_kv_lines(bytes)}));
  }
}

}  // namespace
}  // namespace keyhole::tools

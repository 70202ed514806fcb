// The pass-key task: every answer stands in the prose, once, and the prose is the haystack's.
#include "tools/tasks/passkey_task.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "tools/terminal/errors.h"

namespace keyhole::tools {
namespace {

const std::string& passkey_haystack() {
  static const std::string text = [] {
    std::string prose;
    for (int i = 0; i < 400; ++i) prose += "Sentence " + std::to_string(i) + " of a long story. ";
    return prose;
  }();
  return text;
}

PasskeyTaskOptions passkey_options(size_t bytes, size_t questions, uint64_t seed) {
  return {
      .context_bytes = bytes, .questions = questions, .seed = seed, .haystack = passkey_haystack()};
}

/// What stands between two texts; fails if they are not there.
std::string between(const std::string& text, const std::string& before, const std::string& after) {
  EXPECT_TRUE(text.starts_with(before)) << text;
  EXPECT_TRUE(text.ends_with(after)) << text;
  return text.substr(before.size(), text.size() - before.size() - after.size());
}

bool all_within(const std::string& text, char low, char high) {
  return std::all_of(text.begin(), text.end(), [=](char c) { return c >= low && c <= high; });
}

TEST(PasskeyTask, EveryAnswerStandsInTheContextOnce) {
  for (uint64_t seed = 0; seed < 30; ++seed) {
    const size_t bytes = 300 + 331 * seed;
    const size_t questions = 1 + seed % max_passkeys(bytes);
    SCOPED_TRACE(::testing::Message() << "seed " << seed << ", " << bytes << " bytes");
    const Task task = make_passkey_task(passkey_options(bytes, questions, seed));
    EXPECT_EQ(task.context.size(), bytes);
    ASSERT_EQ(task.questions.size(), questions);
    std::set<std::string> names;
    for (const Question& question : task.questions) {
      EXPECT_LE(question.prompt.size(), kMaxPasskeyQuestionBytes);
      const std::string name =
          between(question.prompt, "\n[Question: what is the pass key of ", "? Answer: ");
      EXPECT_TRUE(name.size() >= 4 && name.size() <= 7 && all_within(name, 'a', 'z')) << name;
      EXPECT_TRUE(names.insert(name).second) << name << " occurs twice";
      const std::string digits = between(question.answer, "", ".]");
      EXPECT_TRUE(digits.size() >= 5 && digits.size() <= 7 && all_within(digits, '0', '9'))
          << digits;
      const std::string sentence = "\n[The pass key of " + name + " is " + digits + ".]\n";
      const size_t at = task.context.find(sentence);
      ASSERT_NE(at, std::string::npos) << sentence;
      EXPECT_EQ(task.context.find(" " + name + " is ", at + sentence.size()), std::string::npos);
    }
  }
}

TEST(PasskeyTask, WithoutItsSentencesTheContextIsTheHaystackFromSomewhere) {
  for (const size_t bytes : {2000, 40000}) {  // the second repeats the haystack
    const Task task = make_passkey_task(passkey_options(bytes, 7, 3));
    std::string prose = task.context;
    const std::string end = ".]\n";
    for (size_t i = 0; i < 7; ++i) {
      const size_t at = prose.find("\n[The pass key of ");
      ASSERT_NE(at, std::string::npos);
      prose.erase(at, prose.find(end, at) + end.size() - at);
    }
    std::string endless = passkey_haystack();
    while (endless.size() < prose.size() + passkey_haystack().size()) endless += passkey_haystack();
    EXPECT_NE(endless.find(prose), std::string::npos);
  }
}

TEST(PasskeyTask, HidesKeysEverywhere) {
  std::vector<int> quarter(4, 0);
  for (uint64_t seed = 0; seed < 50; ++seed) {
    const Task task = make_passkey_task(passkey_options(20000, 20, seed));
    for (const Question& question : task.questions) {
      ++quarter[task.context.find(question.answer) * 4 / task.context.size()];
    }
  }
  for (const int count : quarter) EXPECT_NEAR(count, 250, 80);
}

TEST(PasskeyTask, IsTheSameForTheSameSeedOnly) {
  EXPECT_EQ(make_passkey_task(passkey_options(4000, 5, 1)).context,
            make_passkey_task(passkey_options(4000, 5, 1)).context);
  EXPECT_NE(make_passkey_task(passkey_options(4000, 5, 1)).context,
            make_passkey_task(passkey_options(4000, 5, 2)).context);
}

TEST(PasskeyTask, RefusesWhatCannotBe) {
  EXPECT_THROW((void)make_passkey_task(passkey_options(255, 1, 0)), UsageError);
  EXPECT_THROW((void)make_passkey_task(passkey_options(4096, 17, 0)), UsageError);
  EXPECT_THROW((void)make_passkey_task(passkey_options(4096, 0, 0)), UsageError);
  PasskeyTaskOptions options = passkey_options(4096, 4, 0);
  options.haystack = "";
  EXPECT_THROW((void)make_passkey_task(options), UsageError);
}

}  // namespace
}  // namespace keyhole::tools

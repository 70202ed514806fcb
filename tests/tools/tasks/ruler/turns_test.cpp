// Turns over one context: the text letter by letter, and answers found in it by reading.
#include <map>
#include <set>

#include "tests/tools/tasks/ruler/ruler_samples.h"

namespace keyhole::tools::ruler {
namespace {

TEST(RulerTurns, AskAboutLockersAndThenAboutThoseAskedAbout) {
  const std::string head =
      "A list of lockers follows. Memorize it. I will ask about several of them, one after the "
      "other.\n";
  const auto generator = generator_of("turns", setup_of(4096, 7));
  std::set<std::string> asked_in_all;
  for (int i = 0; i < 3; ++i) {
    const Sample sample = generator->draw(0, 40);
    // Rebuilds the list from what it says.
    std::map<std::string, std::pair<std::string, std::string>> lockers;
    std::string list;
    for (const std::string& line : lines_in(between(sample.prompt, head, "\nQuestion: "))) {
      const std::string key = between(line, "Locker ", " has");
      const std::string code = between(line, "the code ", " and");
      const std::string content = between(line, "holds the ", ".");
      EXPECT_EQ(code.size(), 7U);
      EXPECT_EQ(code.find_first_not_of("0123456789"), std::string::npos);
      lockers[key] = {code, content};
      list += "Locker " + key + " has the code " + code + " and holds the " + content + ".\n";
    }
    ASSERT_EQ(lockers.size(), 40U) << "each has its own key";

    // All questions as one list, the first from the prompt.
    std::vector<FollowUp> turns = sample.follow_ups;
    const std::string first = between(sample.prompt + "\n", "\nQuestion: ", "\n");
    EXPECT_EQ(sample.prompt, head + list + "Question: " + first);
    turns.insert(turns.begin(),
                 {"Question: " + first, sample.prefix, sample.references, sample.answer});
    ASSERT_EQ(turns.size(), 10U);
    std::vector<std::string> keys;
    for (int t = 0; t < 5; ++t) {
      keys.push_back(between(turns[t].prompt, "locker ", "?"));
      EXPECT_EQ(turns[t].prompt, "Question: What is the code of locker " + keys.back() + "?");
      EXPECT_EQ(turns[t].prefix, " Answer: The code of locker " + keys.back() + " is");
      EXPECT_EQ(turns[t].references, std::vector<std::string>{lockers.at(keys.back()).first});
      asked_in_all.insert(keys.back());
    }
    EXPECT_EQ(std::set<std::string>(keys.begin(), keys.end()).size(), 5U);
    const std::vector<std::string> ordinals = {"first", "second", "third", "fourth", "fifth"};
    for (int t = 0; t < 5; ++t) {
      const FollowUp& turn = turns[5 + t];
      EXPECT_EQ(turn.prompt,
                "Question: What does the locker hold that I asked about " + ordinals[t] + "?");
      EXPECT_EQ(turn.prefix, " Answer: It holds the");
      EXPECT_EQ(turn.references, std::vector<std::string>{lockers.at(keys[t]).second});
    }
    for (const FollowUp& turn : turns) EXPECT_EQ(turn.answer, " " + turn.references.front() + ".");
  }
  EXPECT_EQ(asked_in_all.size(), 15U) << "every sample draws anew";
}

}  // namespace
}  // namespace keyhole::tools::ruler

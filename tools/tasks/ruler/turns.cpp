// Several turns over one context: the task turns.
#include <array>
#include <utility>

#include "tools/tasks/ruler/draws.h"
#include "tools/tasks/ruler/generators.h"
#include "tools/tasks/ruler/word_lists.h"

namespace keyhole::tools::ruler {
namespace {

constexpr std::string_view kTurnsTemplate =
    "A list of lockers follows. Memorize it. I will ask about several of them, one after the "
    "other.\n{context}\n{question}";
constexpr std::string_view kLocker = "Locker {key} has the code {code} and holds the {content}.";
constexpr std::string_view kCodeQuestion = "Question: What is the code of locker {key}?";
constexpr std::string_view kCodePrefix = " Answer: The code of locker {key} is";
constexpr std::string_view kContentQuestion =
    "Question: What does the locker hold that I asked about {ordinal}?";
constexpr std::string_view kContentPrefix = " Answer: It holds the";
constexpr std::array<std::string_view, 5> kOrdinals = {"first", "second", "third", "fourth",
                                                       "fifth"};

struct Locker {
  std::string key, code, content;
};

class TurnsGenerator : public Generator {
 public:
  explicit TurnsGenerator(const TaskSetup& setup) : random_(setup.seed) {}

  [[nodiscard]] SizeSearch size_search() const override {
    // The questions are as long as some tens of lockers: a smaller text would seem to have fewer of them in a length.
    return {.step = 10, .probe = 100, .margin = 3};
  }

  [[nodiscard]] Sample draw(size_t /*index*/, size_t units) override {
    const std::vector<std::string> keys = distinct_pairs(random_, units);
    std::vector<Locker> lockers;
    std::vector<std::string> lines;
    for (const std::string& key : keys) {
      const Locker& locker = lockers.emplace_back(
          Locker{key, decimal(random_, 1000000, 10000000), nouns()[random_.below(nouns().size())]});
      lines.push_back(
          filled(kLocker, {{"key", key}, {"code", locker.code}, {"content", locker.content}}));
    }
    std::vector<FollowUp> turns;
    const std::vector<size_t> asked = distinct(random_, kOrdinals.size(), units);
    for (const size_t i : asked) {
      const Locker& locker = lockers[i];
      turns.push_back({filled(kCodeQuestion, {{"key", locker.key}}),
                       filled(kCodePrefix, {{"key", locker.key}}),
                       {locker.code},
                       " " + locker.code + "."});
    }
    // What the answer is about stands in the turns before, the answer itself in the context.
    for (size_t i = 0; i < asked.size(); ++i) {
      const std::string& content = lockers[asked[i]].content;
      turns.push_back({filled(kContentQuestion, {{"ordinal", kOrdinals[i]}}),
                       std::string(kContentPrefix),
                       {content},
                       " " + content + "."});
    }
    FollowUp& first = turns.front();
    return {.prompt = filled(kTurnsTemplate,
                             {{"context", joined(lines, "\n")}, {"question", first.prompt}}),
            .prefix = first.prefix,
            .references = first.references,
            .answer = first.answer,
            .follow_ups = {turns.begin() + 1, turns.end()}};
  }

 private:
  Random random_;
};

}  // namespace

std::unique_ptr<Generator> make_turns(const TaskSetup& setup) {
  return std::make_unique<TurnsGenerator>(setup);
}

}  // namespace keyhole::tools::ruler

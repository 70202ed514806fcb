// Common words: the task cwe of RULER.
#include <algorithm>
#include <utility>

#include "tools/tasks/ruler/draws.h"
#include "tools/tasks/ruler/generators.h"
#include "tools/tasks/ruler/noise.h"
#include "tools/tasks/ruler/word_lists.h"

namespace keyhole::tools::ruler {
namespace {

constexpr std::string_view kCweTemplate =
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n{context}\nQuestion: What are the 10 most common "
    "words in the above list?";
constexpr std::string_view kCwePrefix =
    " Answer: The top 10 words that appear most often in the list are:";

constexpr size_t kCommonWords = 10;

/// How often the common words are repeated, and the others; and how many different words the example has.
struct CweCounts {
  size_t common, others;
  size_t example_words, example_common, example_others;
};
constexpr CweCounts kUsualCounts{30, 3, 40, 10, 3};
constexpr CweCounts kShortCounts{6, 1, 20, 3, 1};

std::string numbered(const std::vector<std::string>& words) {
  std::string out;
  for (size_t i = 0; i < words.size(); ++i) {
    out += (i == 0 ? "" : " ") + std::to_string(i + 1) + ". " + words[i];
  }
  return out;
}

struct CweList {
  std::string text;
  std::vector<std::string> common;
};

class Cwe : public Generator {
 public:
  explicit Cwe(const TaskSetup& setup)
      : seed_(setup.seed),
        random_(setup.seed),
        counts_(setup.length < kUsualLength ? kShortCounts : kUsualCounts) {}

  [[nodiscard]] SizeSearch size_search() const override {
    return {.step = kCommonWords, .probe = 4096, .margin = 2};
  }

  [[nodiscard]] Sample draw(size_t /*index*/, size_t units) override {
    const CweList example =
        list_of(counts_.example_words, counts_.example_common, counts_.example_others);
    const CweList asked = list_of(units, counts_.common, counts_.others);
    const auto prompt = [](const CweList& list) {
      return filled(kCweTemplate, {{"context", list.text}});
    };
    return {.prompt = prompt(example) + std::string(kCwePrefix) + " " + numbered(example.common) +
                      "\n" + prompt(asked),
            .prefix = std::string(kCwePrefix),
            .references = asked.common};
  }

 private:
  /// `count` different words. Where the lists have fewer, pairs of an adjective and a noun stand in for all of them
  /// (RULER then takes a larger list of words).
  [[nodiscard]] std::vector<std::string> drawn_words(size_t count) {
    if (count > all_words().size()) {
      return distinct_pairs(random_, std::min(count, adjectives().size() * nouns().size()));
    }
    std::vector<std::string> out;
    for (const size_t i : distinct(random_, count, all_words().size())) {
      out.push_back(all_words()[i]);
    }
    return out;
  }

  [[nodiscard]] CweList list_of(size_t different, size_t common, size_t others) {
    const std::vector<std::string> drawn = drawn_words(different);
    CweList list;
    std::vector<std::string> all;
    for (size_t i = 0; i < drawn.size(); ++i) {
      const bool is_common = i < kCommonWords;
      all.insert(all.end(), is_common ? common : others, drawn[i]);
      if (is_common) list.common.push_back(drawn[i]);
    }
    // The same order in every sample of a size: RULER shuffles by a generator that begins with the seed each time.
    Random fixed(seed_);
    shuffle(fixed, all);
    list.text = numbered(all);
    return list;
  }

  uint64_t seed_;
  Random random_;
  CweCounts counts_;
};

}  // namespace

std::unique_ptr<Generator> make_cwe(const TaskSetup& setup) { return std::make_unique<Cwe>(setup); }

}  // namespace keyhole::tools::ruler

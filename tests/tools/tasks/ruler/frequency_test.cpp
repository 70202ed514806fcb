// Counted words: the texts of RULER letter by letter, and how often each word occurs.
#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "tests/temporary_folder.h"
#include "tests/tools/tasks/ruler/ruler_samples.h"
#include "tools/tasks/ruler/word_lists.h"

namespace keyhole::tools::ruler {
namespace {

const std::string kListed =
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n";
const std::string kListQuestion =
    "\nQuestion: What are the 10 most common words in the above list?";
const std::string kListPrefix = " Answer: The top 10 words that appear most often in the list are:";

/// The words of "1. word 2. word ...", whose numbers must be right.
std::vector<std::string> numbered_words(const std::string& text) {
  std::vector<std::string> out;
  const std::vector<std::string> parts = words_in(text);
  for (size_t i = 0; i + 1 < parts.size(); i += 2) {
    EXPECT_EQ(parts[i], std::to_string(i / 2 + 1) + ".");
    out.push_back(parts[i + 1]);
  }
  return out;
}

/// How many words occur how often.
std::map<size_t, size_t> counts_of(const std::vector<std::string>& words) {
  std::map<std::string, size_t> of_word;
  for (const std::string& word : words) ++of_word[word];
  std::map<size_t, size_t> out;
  for (const auto& [word, count] : of_word) ++out[count];
  return out;
}

TEST(RulerCwe, CountsOfBothLengths) {
  using Counts = std::map<size_t, size_t>;
  for (const bool usual : {false, true}) {
    const auto generator = generator_of("cwe", setup_of(usual ? 4096 : 4095));
    const Sample sample = generator->draw(0, 100);
    // Example: template, answer; a line end; then the question.
    const size_t second = sample.prompt.rfind(kListed);
    const std::string example = sample.prompt.substr(0, second);
    const std::string listed = between(example, kListed, kListQuestion);
    const std::string answer = between(example, kListQuestion + kListPrefix + " ", "\n");
    EXPECT_EQ(example, kListed + listed + kListQuestion + kListPrefix + " " + answer + "\n");
    const std::vector<std::string> common = numbered_words(answer);
    EXPECT_EQ(common.size(), 10U);
    const std::vector<std::string> example_words = numbered_words(listed);
    EXPECT_EQ(counts_of(example_words),
              usual ? (Counts{{10, 10}, {3, 30}}) : (Counts{{3, 10}, {1, 10}}));
    for (const std::string& word : common) {
      EXPECT_EQ(std::count(example_words.begin(), example_words.end(), word), usual ? 10 : 3);
    }

    const std::string context = between(sample.prompt.substr(second), kListed, kListQuestion);
    EXPECT_EQ(sample.prompt.substr(second), kListed + context + kListQuestion);
    EXPECT_EQ(sample.prefix, kListPrefix);
    const std::vector<std::string> words = numbered_words(context);
    EXPECT_EQ(counts_of(words), usual ? (Counts{{30, 10}, {3, 90}}) : (Counts{{6, 10}, {1, 90}}));
    EXPECT_EQ(sample.references.size(), 10U);
    for (const std::string& word : sample.references) {
      EXPECT_EQ(std::count(words.begin(), words.end(), word), usual ? 30 : 6);
      EXPECT_TRUE(std::binary_search(all_words().begin(), all_words().end(), word)) << word;
    }
  }
}

TEST(RulerCwe, TheOrderOfASizeIsFixed) {
  const auto generator = generator_of("cwe", setup_of(4096));
  std::vector<size_t> places;
  std::set<std::string> words;
  for (int i = 0; i < 3; ++i) {
    const Sample sample = generator->draw(0, 200);
    const size_t second = sample.prompt.rfind(kListed);
    const std::vector<std::string> listed =
        numbered_words(between(sample.prompt.substr(second), kListed, kListQuestion));
    std::vector<size_t> now;
    for (size_t at = 0; at < listed.size(); ++at) {
      if (listed[at] == sample.references.front()) now.push_back(at);
    }
    EXPECT_EQ(now.size(), 30U);
    if (i > 0) {
      EXPECT_EQ(now, places);
    }
    places = now;
    words.insert(sample.references.front());
  }
  EXPECT_EQ(words.size(), 3U);
}

TEST(RulerCwe, TakesPairsWhereTheListsEnd) {
  const auto generator = generator_of("cwe", setup_of(4095));
  const size_t more = all_words().size() + 1;
  const Sample sample = generator->draw(0, more);
  const size_t second = sample.prompt.rfind(kListed);
  const std::vector<std::string> words =
      numbered_words(between(sample.prompt.substr(second), kListed, kListQuestion));
  EXPECT_EQ(counts_of(words), (std::map<size_t, size_t>{{6, 10}, {1, more - 10}}));
  for (const std::string& word : words) EXPECT_EQ(times_in(word, "-"), 1U) << word;
}

TEST(RulerFwe, CountsFallWithTheSquareOfTheRank) {
  const uint32_t length = 4096;
  const auto generator = generator_of("fwe", setup_of(length));
  // 4046 tokens for the text: 80 words; the text begins with 674 of them and grows by 126.
  EXPECT_EQ(generator->size_search().step, 1U);
  EXPECT_EQ(generator->size_search().probe, 5U);
  const std::string begin =
      "Read the following coded text and track the frequency of each coded word. Find the three "
      "most frequently appeared coded words. ";
  const std::string question =
      "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the "
      "three most frequently appeared words in the above coded text?";
  std::vector<std::string> first;
  for (const size_t units : {5U, 5U, 20U}) {
    const Sample sample = generator->draw(0, units);
    const std::string text = between(sample.prompt, begin, question);
    EXPECT_EQ(sample.prompt, begin + text + question);
    EXPECT_EQ(
        sample.prefix,
        " Answer: According to the coded text above, the three most frequently appeared words "
        "are:");
    std::map<std::string, size_t> counts;
    const std::vector<std::string> words = words_in(text);
    for (const std::string& word : words) ++counts[word];
    const double all = 674.0 + 126.0 * static_cast<double>(units - 5);
    const auto expected = [all](size_t rank) {
      return static_cast<size_t>(all / (static_cast<double>(rank * rank) * M_PI * M_PI / 6.0));
    };
    EXPECT_EQ(counts["..."], expected(1));
    ASSERT_EQ(sample.references.size(), 3U);
    for (size_t i = 0; i < 3; ++i) EXPECT_EQ(counts[sample.references[i]], expected(2 + i));
    std::vector<size_t> sorted;
    size_t total = 0;
    for (const auto& [word, count] : counts) {
      sorted.push_back(count);
      if (word == "...") continue;
      EXPECT_EQ(word.size(), 6U);
      EXPECT_TRUE(
          std::all_of(word.begin(), word.end(), [](char c) { return c >= 'a' && c <= 'z'; }));
    }
    std::sort(sorted.rbegin(), sorted.rend());
    for (size_t rank = 1; rank <= 80; ++rank) {
      const size_t count = rank <= sorted.size() ? sorted[rank - 1] : 0;
      EXPECT_EQ(count, expected(rank)) << rank;
      total += count;
    }
    EXPECT_EQ(total, words.size());
    EXPECT_NE(sample.references, first);  // other words in every sample
    first = sample.references;
  }
  const std::string refused = error_of([] { (void)generator_of("fwe", setup_of(249)); });
  EXPECT_EQ(refused,
            "the vocabulary has 3 words, one in 50 tokens of the length; allowed: 4 or more");
}

}  // namespace
}  // namespace keyhole::tools::ruler

// Needles: the texts of RULER letter by letter, and how many needles lie where.
#include <algorithm>
#include <cctype>
#include <set>

#include "tests/tools/tasks/ruler/ruler_samples.h"
#include "tools/tasks/ruler/essay.h"
#include "tools/tasks/ruler/word_lists.h"

namespace keyhole::tools::ruler {
namespace {

const std::string kGrass =
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.";

/// The key and the value of a needle about `type`; fails for any other line.
std::pair<std::string, std::string> needle_parts(const std::string& line, const std::string& type) {
  const std::string begin = "One of the special magic " + type + " for ";
  EXPECT_TRUE(line.starts_with(begin)) << line;
  EXPECT_TRUE(line.ends_with(".")) << line;
  const size_t is = line.find(" is: ");
  EXPECT_NE(is, std::string::npos) << line;
  return {line.substr(begin.size(), is - begin.size()), line.substr(is + 5, line.size() - is - 6)};
}

bool is_word_pair(const std::string& text) {
  const size_t dash = text.find('-');
  const auto has = [](const std::vector<std::string>& words, const std::string& word) {
    return std::binary_search(words.begin(), words.end(), word);
  };
  return dash != std::string::npos && has(adjectives(), text.substr(0, dash)) &&
         has(nouns(), text.substr(dash + 1));
}

bool is_seven_digits(const std::string& text) {
  return text.size() == 7 && text[0] != '0' && std::all_of(text.begin(), text.end(), [](char c) {
           return std::isdigit(static_cast<unsigned char>(c)) != 0;
         });
}

bool is_uuid4(const std::string& text) {
  if (text.size() != 36 || text[14] != '4') return false;
  for (size_t i = 0; i < text.size(); ++i) {
    const bool dash = i == 8 || i == 13 || i == 18 || i == 23;
    if ((text[i] == '-') != dash) return false;
    if (!dash && std::string("0123456789abcdef").find(text[i]) == std::string::npos) return false;
  }
  return std::string("89ab").find(text[19]) != std::string::npos;
}

/// The lines of the haystack, between the first line of the prompt and the question.
std::vector<std::string> context_lines(const Sample& sample) {
  std::vector<std::string> lines = lines_in(sample.prompt);
  return {lines.begin() + 1, lines.end() - 1};
}

TEST(RulerNiah, SingleInNoiseIsInTheSingular) {
  const auto generator = generator_of("niah_single_1", setup_of(4096));
  EXPECT_EQ(generator->size_search().step, 25U);
  EXPECT_EQ(generator_of("niah_single_1", setup_of(4095))->size_search().step, 5U);
  const Sample sample = generator->draw(0, 7);
  const std::vector<std::string> lines = context_lines(sample);
  ASSERT_EQ(lines.size(), 8U);
  EXPECT_EQ(std::count(lines.begin(), lines.end(), kGrass), 7);
  const auto needle = std::find_if(lines.begin(), lines.end(),
                                   [](const std::string& line) { return line != kGrass; });
  ASSERT_NE(needle, lines.end());
  EXPECT_NE(needle, lines.end() - 1);  // needles come in front of a line of noise
  const auto [key, value] = needle_parts(*needle, "numbers");
  EXPECT_TRUE(is_word_pair(key)) << key;
  EXPECT_TRUE(is_seven_digits(value)) << value;
  std::string expected =
      "A special magic number is hidden within the following text. Make sure to memorize it. I "
      "will "
      "quiz you about the number afterwards.\n";
  for (const std::string& line : lines) expected += line + "\n";
  expected += "What is the special magic number for " + key + " mentioned in the provided text?";
  EXPECT_EQ(sample.prompt, expected);
  EXPECT_EQ(sample.prefix,
            " The special magic number for " + key + " mentioned in the provided text is");
  EXPECT_EQ(sample.references, std::vector<std::string>{value});
}

TEST(RulerNiah, SeveralQueriesAreInThePlural) {
  const auto generator = generator_of("niah_multiquery", setup_of(4096));
  EXPECT_EQ(generator->size_search().step, 500U);
  const Sample sample = generator->draw(0, 500);
  const std::string begin =
      "Some special magic numbers are hidden within the following text. Make sure to memorize it. "
      "I "
      "will quiz you about the numbers afterwards.\n";
  ASSERT_TRUE(sample.prompt.starts_with(begin));
  const std::string query = between(sample.prompt, "\nWhat are all the special magic numbers for ",
                                    " mentioned in the provided text?");
  EXPECT_TRUE(sample.prompt.ends_with("\nWhat are all the special magic numbers for " + query +
                                      " mentioned in the provided text?"));
  EXPECT_EQ(sample.prefix,
            " The special magic numbers for " + query + " mentioned in the provided text are");
  ASSERT_EQ(sample.references.size(), 4U);
  // k1, k2, k3, and k4, each with its value in a needle of its own.
  std::vector<std::string> keys;
  for (size_t at = 0; at <= query.size();) {
    const size_t end = std::min(query.find(", ", at), query.size());
    keys.push_back(query.substr(at, end - at));
    at = end + 2;
  }
  ASSERT_EQ(keys.size(), 4U);
  ASSERT_TRUE(keys[3].starts_with("and "));
  keys[3] = keys[3].substr(4);
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_TRUE(is_word_pair(keys[i])) << keys[i];
    EXPECT_EQ(times_in(sample.prompt, " One of the special magic numbers for " + keys[i] +
                                          " is: " + sample.references[i] + "."),
              1U);
  }
}

TEST(RulerNiah, KindsAndNumbersOfNeedles) {
  struct Task {
    const char* name;
    const char* type;
    size_t needles, keys, references;
    bool (*is_value)(const std::string&);
  };
  for (const Task& task : {Task{"niah_single_2", "numbers", 1, 1, 1, is_seven_digits},
                           Task{"niah_single_3", "uuids", 1, 1, 1, is_uuid4},
                           Task{"niah_multikey_1", "numbers", 4, 4, 1, is_seven_digits},
                           Task{"niah_multivalue", "numbers", 4, 1, 4, is_seven_digits},
                           Task{"niah_multiquery", "numbers", 4, 4, 4, is_seven_digits}}) {
    SCOPED_TRACE(task.name);
    const Sample sample = generator_of(task.name, setup_of(8192))->draw(0, 1000);
    std::string context = between(sample.prompt, " afterwards.\n", "\nWhat ");
    std::set<std::string> keys;
    std::vector<std::string> values;
    const std::string begin = std::string("One of the special magic ") + task.type + " for ";
    for (size_t at = context.find(begin); at != std::string::npos; at = context.find(begin)) {
      const size_t end = context.find('.', at) + 1;
      const auto [key, value] = needle_parts(context.substr(at, end - at), task.type);
      EXPECT_TRUE(is_word_pair(key)) << key;
      EXPECT_TRUE(task.is_value(value)) << value;
      keys.insert(key);
      values.push_back(value);
      context.erase(at, end - at);
    }
    EXPECT_EQ(values.size(), task.needles);
    EXPECT_EQ(keys.size(), task.keys);
    EXPECT_EQ(sample.references.size(), task.references);
    for (const std::string& reference : sample.references) {
      EXPECT_NE(std::find(values.begin(), values.end(), reference), values.end());
    }
    // Without the needles the essay is left: its first 1000 words, and it begins anew where it ends.
    std::vector<std::string> expected;
    while (expected.size() < 1000) {
      for (const std::string& word : words_in(kThreeSentences)) expected.push_back(word);
    }
    expected.resize(1000);
    EXPECT_EQ(words_in(context), expected);
  }
}

TEST(RulerNiah, NeedlesAmongNeedles) {
  for (const bool uuids : {false, true}) {
    const std::string type = uuids ? "uuids" : "numbers";
    const auto generator =
        generator_of(uuids ? "niah_multikey_3" : "niah_multikey_2", setup_of(4096));
    const Sample sample = generator->draw(0, 50);
    const std::vector<std::string> lines = context_lines(sample);
    EXPECT_EQ(lines.size(), 51U);
    std::set<std::string> keys;
    size_t asked = 0;
    for (const std::string& line : lines) {
      const auto [key, value] = needle_parts(line, type);
      EXPECT_TRUE(uuids ? is_uuid4(key) : is_word_pair(key)) << key;
      EXPECT_TRUE(uuids ? is_uuid4(value) : is_seven_digits(value)) << value;
      keys.insert(key);
      if (value != sample.references.front()) continue;
      ++asked;
      EXPECT_TRUE(sample.prompt.ends_with("\nWhat is the special magic " +
                                          type.substr(0, type.size() - 1) + " for " + key +
                                          " mentioned in the provided text?"));
    }
    EXPECT_EQ(asked, 1U);
    EXPECT_EQ(keys.size(), 51U);
  }
}

TEST(RulerNiah, NeedlesOfAnEssayStandAtTheirDepths) {
  // 1500 words are 300 sentences, of which a needle may have int(300 d / 100) before it.
  std::set<size_t> allowed;
  for (int i = 0; i < 40; ++i) {
    const int percent = static_cast<int>(100.0 * i / 39.0 + 0.5);
    allowed.insert(static_cast<size_t>(300 * (percent / 100.0)));
  }
  const auto generator = generator_of("niah_multikey_1", setup_of(8192));
  std::set<size_t> seen;
  for (int i = 0; i < 40; ++i) {
    const Sample sample = generator->draw(0, 1500);
    const std::string context = between(sample.prompt, " afterwards.\n", "\nWhat ");
    size_t before = 0;
    for (const std::string& sentence : sentences(context)) {
      if (sentence.find("One of the special magic") == std::string::npos) {
        ++before;
      } else {
        EXPECT_EQ(allowed.count(before), 1U) << before;
        seen.insert(before);
      }
    }
    EXPECT_EQ(before, 300U);
  }
  EXPECT_GT(seen.size(), 30U);
}

TEST(RulerNiah, SamplesDifferButTheOrderOfNeedlesIsFixed) {
  const auto generator = generator_of("niah_multivalue", setup_of(8192));
  std::vector<size_t> first_order;
  std::set<std::string> prompts;
  for (int i = 0; i < 5; ++i) {
    const Sample sample = generator->draw(0, 500);
    prompts.insert(sample.prompt);
    // The order in the text of the values, which are named in the order in which they were drawn.
    std::vector<std::pair<size_t, size_t>> places;
    for (size_t v = 0; v < 4; ++v) places.emplace_back(sample.prompt.find(sample.references[v]), v);
    std::sort(places.begin(), places.end());
    std::vector<size_t> order;
    for (const auto& [place, v] : places) order.push_back(v);
    if (first_order.empty()) first_order = order;
    EXPECT_EQ(order, first_order);
  }
  EXPECT_EQ(prompts.size(), 5U);
  const auto first = [](uint64_t seed) {
    return generator_of("niah_multivalue", setup_of(8192, seed))->draw(0, 500).prompt;
  };
  EXPECT_EQ(first(42), first(42));
  EXPECT_NE(first(42), first(43));
}

TEST(RulerWords, ListsAreSortedAndWithoutRepetition) {
  EXPECT_GT(nouns().size(), 2500U);
  EXPECT_GT(adjectives().size(), 1200U);
  EXPECT_GT(verbs().size(), 1200U);
  EXPECT_GT(all_words().size(), 5000U);
  for (const auto* words : {&nouns(), &adjectives(), &verbs(), &all_words()}) {
    EXPECT_TRUE(std::is_sorted(words->begin(), words->end()));
    EXPECT_EQ(std::adjacent_find(words->begin(), words->end()), words->end());
    for (const std::string& word : *words) {
      EXPECT_TRUE(std::all_of(word.begin(), word.end(), [](char c) {
        return c >= 'a' && c <= 'z';
      })) << word;
    }
  }
}

TEST(RulerEssay, IsCutBehindSentences) {
  EXPECT_EQ(sentences("One. Two is 3.5 long! (Three?) four"),
            (std::vector<std::string>{"One.", "Two is 3.5 long!", "(Three?)", "four"}));
  EXPECT_EQ(sentences(""), std::vector<std::string>{});
  EXPECT_EQ(Essay(" a\n b\t\tc ").words(5), "a b c a b");
}

}  // namespace
}  // namespace keyhole::tools::ruler

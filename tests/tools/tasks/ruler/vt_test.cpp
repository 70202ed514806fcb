// Variable tracking: the text of RULER letter by letter, the chain, the example.
#include <algorithm>
#include <set>

#include "tests/tools/tasks/ruler/ruler_samples.h"

namespace keyhole::tools::ruler {
namespace {

const std::string kTrack =
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n";

struct Tracked {
  std::string text;  ///< template and answer prefix as they should be
  std::vector<std::string> names;
  std::string value;
  size_t noise = 0;
};

/// Follows the assignments of a text, and writes the whole text anew.
Tracked tracked(const std::string& context) {
  Tracked out;
  for (const std::string& line : lines_in(context)) {
    if (!line.starts_with("VAR ")) {
      EXPECT_EQ(line,
                "The grass is green. The sky is blue. The sun is yellow. Here we go. There and "
                "back again.");
      ++out.noise;
      continue;
    }
    const std::string name = line.substr(4, line.find(" = ") - 4);
    const std::string assigned = line.substr(line.find(" = ") + 3);
    if (out.names.empty()) {
      out.value = assigned;
    } else {
      EXPECT_EQ(assigned, "VAR " + out.names.back() + " ");  // with the blank at its end
    }
    out.names.push_back(name);
  }
  out.text = kTrack + context + "\nQuestion: Find all variables that are assigned the value " +
             out.value +
             " in the text above. Answer: According to the chain(s) of variable assignment in the "
             "text above, 5 variables are assigned the value " +
             out.value + ", they are: ";
  return out;
}

TEST(RulerVt, IsAnExampleAndAChain) {
  const auto generator = generator_of("vt", setup_of(4096));
  EXPECT_EQ(generator->size_search().step, 10U);
  EXPECT_EQ(generator_of("vt", setup_of(4095))->size_search().step, 5U);
  std::set<std::string> example_names;
  std::set<std::string> values;
  for (int i = 0; i < 3; ++i) {
    const Sample sample = generator->draw(0, 30);
    const size_t second = sample.prompt.rfind(kTrack);
    ASSERT_NE(second, 0U);
    ASSERT_NE(second, std::string::npos);
    const std::string whole = sample.prompt + sample.prefix;

    const Tracked asked = tracked(between(whole.substr(second), kTrack, "\nQuestion: "));
    EXPECT_EQ(whole.substr(second), asked.text);
    EXPECT_TRUE(sample.prefix.starts_with(" Answer: "));
    EXPECT_EQ(asked.noise, 30U);
    EXPECT_EQ(asked.names, sample.references);
    EXPECT_EQ(std::set<std::string>(asked.names.begin(), asked.names.end()).size(), 5U);
    for (const std::string& name : asked.names) EXPECT_EQ(name.size(), 5U);
    EXPECT_EQ(asked.value.size(), 5U);

    const Tracked example = tracked(between(whole, kTrack, "\nQuestion: "));
    std::string solved = example.text + " ";
    for (size_t n = 0; n < example.names.size(); ++n)
      solved += (n == 0 ? "" : " ") + example.names[n];
    EXPECT_EQ(whole.substr(0, second), solved + "\n\n");
    ASSERT_EQ(example.names.size(), 5U);
    for (const std::string& name : example.names) {
      EXPECT_EQ(name.size(), 3U);
      example_names.insert(name);
    }
    // At most 500 tokens, which are words here, and no line of noise (17 words) more would fit.
    const size_t words = words_in(example.text).size();
    EXPECT_LE(words, 500U);
    EXPECT_GT(words, 500U - 19U);
    values.insert(example.value);
    values.insert(asked.value);
  }
  EXPECT_EQ(example_names.size(), 15U);  // names and values of its own in every sample
  EXPECT_EQ(values.size(), 6U);
}

TEST(RulerVt, TakesTheSmallestExampleWhereTokensAreBytes) {
  TaskSetup setup = setup_of(4096);
  setup.count_text = [](const std::string& text) { return text.size(); };
  const Sample sample = generator_of("vt", setup)->draw(0, 10);
  EXPECT_EQ(tracked(between(sample.prompt, kTrack, "\nQuestion: ")).noise, 5U);
}

}  // namespace
}  // namespace keyhole::tools::ruler

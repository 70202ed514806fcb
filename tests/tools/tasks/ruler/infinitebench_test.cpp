// The synthetic tasks of InfiniteBench, letter by letter.
#include <algorithm>

#include "tests/tools/tasks/ruler/ruler_samples.h"

namespace keyhole::tools::ruler {
namespace {

const std::string kGrassLine =
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n";

std::string grass(size_t lines) {
  std::string out;
  for (size_t i = 0; i < lines; ++i) out += kGrassLine;
  return out;
}

TEST(InfiniteBench, PassKeysGoThroughTheText) {
  TaskSetup setup = setup_of(4096);
  setup.samples = 25;  // five places
  const auto generator = generator_of("infinitebench_passkey", setup);
  for (size_t i = 0; i < 25; ++i) {
    const Sample sample = generator->draw(i, 40);
    const std::string key = sample.references.front();
    EXPECT_EQ(key.size(), 5U);
    const size_t before = 40 * (i / 5) / 4;
    EXPECT_EQ(sample.prompt,
              "There is an important info hidden inside a lot of irrelevant text. Find it and "
              "memorize them. I will quiz you about the important information there.\n\n" +
                  grass(before) + "The pass key is " + key + ". Remember it. " + key +
                  " is the pass key.\n" + grass(40 - before) + "\n\nWhat is the pass key?");
    EXPECT_EQ(sample.prefix, "\n\nThe pass key is");
  }
  setup.chat = true;
  EXPECT_EQ(generator_of("infinitebench_passkey", setup)->draw(0, 5).prefix, "The pass key is");
}

TEST(InfiniteBench, NumbersRepeatDigits) {
  TaskSetup setup = setup_of(4096);
  setup.samples = 30;  // three places
  const auto generator = generator_of("infinitebench_number", setup);
  for (size_t i = 0; i < 30; ++i) {
    const Sample sample = generator->draw(i, 20);
    const std::string key = sample.references.front();
    EXPECT_EQ(key.size(), 10U);
    // Five insertions beside an equal digit: at most five runs of equal digits are left.
    std::string runs = key;
    runs.erase(std::unique(runs.begin(), runs.end()), runs.end());
    EXPECT_LE(runs.size(), 5U);
    const size_t before = 20 * (i / 10) / 2;
    EXPECT_EQ(sample.prompt,
              "There is an important info hidden inside a lot of irrelevant text. Find it. I will "
              "quiz you about the important information there.\n\n" +
                  grass(before) + "The sequence of digits is " + key + ". Remember it. " + key +
                  " is the sequence of digits.\n" + grass(20 - before) +
                  "\n\nWhat is the sequence of digits?");
    EXPECT_EQ(sample.prefix, "\n\nThe sequence of digits is");
  }
}

TEST(InfiniteBench, KeysGoThroughTheObject) {
  TaskSetup setup = setup_of(4096);
  setup.samples = 10;
  const auto generator = generator_of("infinitebench_kv", setup);
  for (size_t i = 0; i < 10; ++i) {
    const Sample sample = generator->draw(i, 35);
    const std::string begin =
        "Extract the value corresponding to the specified key in the JSON object below.\n\nJSON "
        "data:\n";
    const std::string object = between(sample.prompt, begin, "\n\n\nKey: \"");
    const std::string key = between(sample.prompt, "\n\n\nKey: \"", "\"\n");
    EXPECT_EQ(sample.prompt, begin + object + "\n\n\nKey: \"" + key +
                                 "\"\nThe value associated with the specified key is: ");
    EXPECT_EQ(sample.prefix, "");
    EXPECT_TRUE(object.starts_with("{\""));
    EXPECT_TRUE(object.ends_with("\"}"));
    EXPECT_EQ(times_in(object, "\": \""), 35U);
    EXPECT_EQ(times_in(object, "\", \""), 34U);
    const size_t place = object.find("\"" + key + "\": \"" + sample.references.front() + "\"");
    ASSERT_NE(place, std::string::npos);
    EXPECT_EQ(times_in(object.substr(0, place), "\": \""), i * 35 / 10);
  }
}

}  // namespace
}  // namespace keyhole::tools::ruler

// Multi-query associative recall: pairs, and keys that come again in slots whose numbers follow a power law.
#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <random>
#include <set>

#include "tests/tools/tasks/ruler/ruler_samples.h"
#include "tools/tasks/ruler/word_lists.h"

namespace keyhole::tools::ruler {
namespace {

/// A sample read back: the pairs, and in each slot whether a key of them came again.
struct ReadMqar {
  std::map<std::string, std::string> pairs;
  std::vector<bool> slots;
};

ReadMqar read_mqar(const Sample& sample) {
  ReadMqar out;
  const std::string head = "A list of keys follows, each with its value. Memorize it.\n";
  const std::string list = between(sample.prompt, head, "\nQuestion: ");
  EXPECT_EQ(sample.prompt, head + list +
                               "\nQuestion: Some of these keys come again, among new ones. What "
                               "is the value of each?");
  for (const std::string& line : lines_in(list)) {
    out.pairs[line.substr(0, line.find(": "))] = line.substr(line.find(": ") + 2);
  }
  EXPECT_EQ(out.pairs.size(), lines_in(list).size()) << "keys are different";

  // The whole answer as it should be, with the right values behind the keys.
  std::string answer = sample.prefix;
  std::string right = sample.answer;
  std::vector<std::string> values = sample.references;
  for (const FollowUp& next : sample.follow_ups) {
    EXPECT_EQ(next.prompt, "");
    EXPECT_EQ(next.references.size(), 1U);
    values.push_back(next.references.front());
    answer += right + next.prefix;
    right = next.answer;
  }
  answer += right;
  const std::vector<std::string> lines = lines_in(answer);
  EXPECT_EQ(lines.front(), " Answer:");
  std::set<std::string> seen;
  size_t recalled = 0;
  for (size_t i = 1; i < lines.size(); ++i) {
    const std::string key = lines[i].substr(0, lines[i].find(": "));
    const std::string value = lines[i].substr(lines[i].find(": ") + 2);
    EXPECT_TRUE(seen.insert(key).second) << key << " comes once";
    const auto pair = out.pairs.find(key);
    out.slots.push_back(pair != out.pairs.end());
    if (pair == out.pairs.end()) continue;
    EXPECT_EQ(value, pair->second);
    EXPECT_EQ(value, values[recalled++]);
  }
  EXPECT_EQ(recalled, 16U);
  EXPECT_EQ(values.size(), 16U);
  EXPECT_LE(out.slots.size(), 64U);
  EXPECT_TRUE(out.slots.back());
  return out;
}

TEST(Mqar, PairsComeOfTwoHalvesOfTheVocabulary) {
  const auto generator = generator_of("mqar", setup_of(4096, 5));
  for (int i = 0; i < 3; ++i) {
    const ReadMqar read = read_mqar(generator->draw(0, 100));
    EXPECT_EQ(read.pairs.size() + read.slots.size(), 164U) << "all samples are as long";
    for (const auto& [key, value] : read.pairs) {
      EXPECT_TRUE(std::binary_search(nouns().begin(), nouns().end(), key)) << key;
      EXPECT_TRUE(std::binary_search(adjectives().begin(), adjectives().end(), value)) << value;
      EXPECT_FALSE(std::binary_search(nouns().begin(), nouns().end(), value)) << value;
    }
  }
  // More keys than there are nouns: pairs of two.
  const ReadMqar many = read_mqar(generator->draw(0, nouns().size()));
  EXPECT_EQ(many.pairs.size() + many.slots.size(), nouns().size() + 64);
  EXPECT_EQ(std::count(many.pairs.begin()->first.begin(), many.pairs.begin()->first.end(), '-'), 1);
}

TEST(Mqar, SlotsFollowThePowerLaw) {
  // Parts of the slots, and how many of 16 keys come in each on average.
  constexpr std::array<size_t, 5> kEnds = {1, 4, 12, 32, 64};
  using Means = std::array<double, 5>;
  const auto add = [&](Means& means, size_t slot, double weight) {
    for (size_t part = 0; part < kEnds.size(); ++part) {
      if (slot < kEnds[part]) {
        means[part] += weight;
        return;
      }
    }
  };
  constexpr int kDraws = 300;
  Means drawn{};
  const auto generator = generator_of("mqar", setup_of(4096, 6));
  for (int i = 0; i < kDraws; ++i) {
    const std::vector<bool> slots = read_mqar(generator->draw(0, 16)).slots;
    for (size_t slot = 0; slot < slots.size(); ++slot) {
      if (slots[slot]) add(drawn, slot, 1.0 / kDraws);
    }
  }
  // Drawing without replacement by weights is taking the largest u^(1 / weight) (Efraimidis and Spirakis 2006).
  constexpr int kTruth = 5000;
  Means truth{};
  std::mt19937 random(6);
  std::uniform_real_distribution<double> uniform(0.0, 1.0);
  for (int i = 0; i < kTruth; ++i) {
    std::vector<std::pair<double, size_t>> order;
    for (size_t slot = 0; slot < 64; ++slot) {
      const double weight = std::pow(static_cast<double>(slot + 1), 0.01 - 1.0);
      order.emplace_back(-std::log(uniform(random)) / weight, slot);
    }
    std::partial_sort(order.begin(), order.begin() + 16, order.end());
    for (size_t n = 0; n < 16; ++n) add(truth, order[n].second, 1.0 / kTruth);
  }
  // Of a part at most some 2 keys of variance: 0.3 are nearly four standard errors of 300 draws.
  for (size_t part = 0; part < kEnds.size(); ++part) EXPECT_NEAR(drawn[part], truth[part], 0.3);
  EXPECT_GT(truth[0], 0.9) << "the first slot nearly always";
}

}  // namespace
}  // namespace keyhole::tools::ruler

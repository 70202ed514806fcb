// Multi-query associative recall: the task mqar.
//
// Zoology's program (Arora et al. 2023) makes sequences of single tokens: pairs of a key of one half of the vocabulary
// and a value of the other, then slots of two tokens. Keys come again in slots whose numbers are drawn without
// replacement, slot s with a probability proportional to s^(a - 1), a = 0.01; the others hold random tokens. Here keys
// are nouns and values adjectives, so that any vocabulary can be asked; the other slots hold pairs that are new; and
// the value stands behind each key, as in the pairs.
#include <algorithm>
#include <cmath>
#include <iterator>
#include <utility>

#include "tools/tasks/ruler/draws.h"
#include "tools/tasks/ruler/generators.h"
#include "tools/tasks/ruler/word_lists.h"

namespace keyhole::tools::ruler {
namespace {

constexpr std::string_view kMqarTemplate =
    "A list of keys follows, each with its value. Memorize it.\n{context}\nQuestion: Some of these "
    "keys come again, among new ones. What is the value of each?";
constexpr std::string_view kMqarPrefix = " Answer:";

constexpr size_t kRecalls = 16;
constexpr size_t kSlots = 64;
constexpr double kPower = 0.01;

/// The slots of the recalls, ascending.
std::vector<size_t> drawn_slots(Random& random) {
  // Whole numbers, so that every platform draws the same.
  std::vector<uint64_t> weights;
  for (size_t slot = 1; slot <= kSlots; ++slot) {
    weights.push_back(static_cast<uint64_t>(
        std::llround(std::ldexp(std::pow(static_cast<double>(slot), kPower - 1.0), 32))));
  }
  std::vector<size_t> slots;
  while (slots.size() < kRecalls) {
    uint64_t sum = 0;
    for (const uint64_t weight : weights) sum += weight;
    uint64_t left = random.below(sum);
    size_t slot = 0;
    while (left >= weights[slot]) left -= weights[slot++];
    weights[slot] = 0;
    slots.push_back(slot);
  }
  std::sort(slots.begin(), slots.end());
  return slots;
}

/// The adjectives that are no nouns: values, where nouns are keys.
const std::vector<std::string>& values_of_pairs() {
  static const std::vector<std::string> values = [] {
    std::vector<std::string> out;
    std::set_difference(adjectives().begin(), adjectives().end(), nouns().begin(), nouns().end(),
                        std::back_inserter(out));
    return out;
  }();
  return values;
}

class MqarGenerator : public Generator {
 public:
  explicit MqarGenerator(const TaskSetup& setup) : random_(setup.seed) {}

  [[nodiscard]] SizeSearch size_search() const override {
    return {.step = kRecalls, .probe = 16 * kRecalls, .margin = 3};
  }

  [[nodiscard]] Sample draw(size_t /*index*/, size_t units) override {
    const std::vector<std::string> keys = drawn_keys(units + kSlots);
    std::vector<std::string> values, lines;
    for (const std::string& key : keys) {
      values.push_back(values_of_pairs()[random_.below(values_of_pairs().size())]);
      lines.push_back(key + ": " + values.back());
    }
    const std::vector<size_t> slots = drawn_slots(random_);
    // As many pairs as there are slots behind the last recall stand in the list: all samples are as long.
    const size_t listed = units + kSlots - (slots.back() + 1);
    const std::vector<size_t> asked = distinct(random_, kRecalls, listed);

    std::vector<FollowUp> recalls;
    size_t slot = 0;
    for (size_t i = 0; i < kRecalls; ++i, ++slot) {
      std::string prefix(i == 0 ? kMqarPrefix : "");
      for (; slot < slots[i]; ++slot) prefix += "\n" + lines[listed + slot];
      const std::string& value = values[asked[i]];
      recalls.push_back({"", prefix + "\n" + keys[asked[i]] + ":", {value}, " " + value});
    }
    lines.resize(listed);
    return {.prompt = filled(kMqarTemplate, {{"context", joined(lines, "\n")}}),
            .prefix = recalls.front().prefix,
            .references = recalls.front().references,
            .answer = recalls.front().answer,
            .follow_ups = {recalls.begin() + 1, recalls.end()}};
  }

 private:
  /// Different keys: nouns, and where there are not enough, pairs of two.
  [[nodiscard]] std::vector<std::string> drawn_keys(size_t count) {
    const size_t words = nouns().size();
    const bool pairs = count > words;
    std::vector<std::string> keys;
    for (const size_t i : distinct(random_, count, pairs ? words * words : words)) {
      keys.push_back(pairs ? nouns()[i / words] + "-" + nouns()[i % words] : nouns()[i]);
    }
    return keys;
  }

  Random random_;
};

}  // namespace

std::unique_ptr<Generator> make_mqar(const TaskSetup& setup) {
  return std::make_unique<MqarGenerator>(setup);
}

}  // namespace keyhole::tools::ruler

// The synthetic retrieval tasks of InfiniteBench: a pass key, a string of digits, a value of a JSON object.
#include <algorithm>
#include <utility>

#include "tools/tasks/ruler/draws.h"
#include "tools/tasks/ruler/generators.h"
#include "tools/tasks/ruler/noise.h"

namespace keyhole::tools::ruler {
namespace {

constexpr std::string_view kPassKeyTemplate =
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there.\n\n{context}\n\nWhat is the pass key?";
constexpr std::string_view kPassKeyPrefix = "The pass key is";
constexpr std::string_view kPassKeyNeedle =
    "The pass key is {key}. Remember it. {key} is the pass key.\n";

constexpr std::string_view kNumberTemplate =
    "There is an important info hidden inside a lot of irrelevant text. Find it. I will quiz you "
    "about the important information there.\n\n{context}\n\nWhat is the sequence of digits?";
constexpr std::string_view kNumberPrefix = "The sequence of digits is";
constexpr std::string_view kNumberNeedle =
    "The sequence of digits is {key}. Remember it. {key} is the sequence of digits.\n";

// Two line ends are the template's, the third begins the question.
constexpr std::string_view kKeyValueTemplate =
    "Extract the value corresponding to the specified key in the JSON object below.\n\nJSON "
    "data:\n{context}\n\n\nKey: \"{query}\"\nThe value associated with the specified key is: ";

constexpr size_t kKeyDigits = 5;
constexpr SizeSearch kSearch{.step = 5, .probe = 25, .margin = 3};

/// A number in noise. Its places go from the beginning of the text to its end in equal steps, `per_place` samples at
/// each.
class NumberInNoise : public Generator {
 public:
  NumberInNoise(const TaskSetup& setup, bool repeats)
      : random_(setup.seed),
        samples_(setup.samples),
        per_place_(repeats ? 10 : 5),
        repeats_(repeats),
        // Behind a prompt that is continued as a text, the beginning of the answer is a paragraph of its own.
        before_prefix_(setup.chat ? "" : "\n\n") {}

  [[nodiscard]] SizeSearch size_search() const override { return kSearch; }

  [[nodiscard]] Sample draw(size_t index, size_t units) override {
    const size_t places = (samples_ + per_place_ - 1) / per_place_;
    const size_t place = places < 2 ? 0 : units * (index / per_place_) / (places - 1);
    const std::string key = drawn_key();
    const std::string needle = filled(repeats_ ? kNumberNeedle : kPassKeyNeedle, {{"key", key}});
    std::string context;
    for (size_t i = 0; i <= units; ++i) {
      if (i == place) context += needle;
      if (i < units) context += std::string(kNoise) + "\n";
    }
    return {.prompt = filled(repeats_ ? kNumberTemplate : kPassKeyTemplate, {{"context", context}}),
            .prefix = before_prefix_ + std::string(repeats_ ? kNumberPrefix : kPassKeyPrefix),
            .references = {key}};
  }

 private:
  [[nodiscard]] std::string drawn_key() {
    std::string key = random_.digits(kKeyDigits);
    for (size_t i = 0; repeats_ && i < kKeyDigits; ++i) {
      const size_t at = random_.below(key.size());
      key.insert(at, 1, key[at]);
    }
    return key;
  }

  Random random_;
  size_t samples_, per_place_;
  bool repeats_;
  std::string before_prefix_;
};

/// A JSON object, and a key of it. The asked keys go from its beginning to its end in equal steps.
class KeyValue : public Generator {
 public:
  explicit KeyValue(const TaskSetup& setup) : random_(setup.seed), samples_(setup.samples) {}

  [[nodiscard]] SizeSearch size_search() const override { return kSearch; }

  [[nodiscard]] Sample draw(size_t index, size_t units) override {
    const size_t asked = std::min(index * units / samples_, units - 1);
    std::string object = "{";
    std::string key, value;
    for (size_t i = 0; i < units; ++i) {
      const std::string name = uuid(random_);
      const std::string text = uuid(random_);
      object += (i == 0 ? "\"" : ", \"") + name + "\": \"" + text + "\"";
      if (i == asked) {
        key = name;
        value = text;
      }
    }
    object += "}";
    return {.prompt = filled(kKeyValueTemplate, {{"context", object}, {"query", key}}),
            .prefix = "",
            .references = {value}};
  }

 private:
  Random random_;
  size_t samples_;
};

}  // namespace

std::unique_ptr<Generator> make_pass_key(const TaskSetup& setup) {
  return std::make_unique<NumberInNoise>(setup, false);
}

std::unique_ptr<Generator> make_number_string(const TaskSetup& setup) {
  return std::make_unique<NumberInNoise>(setup, true);
}

std::unique_ptr<Generator> make_key_value(const TaskSetup& setup) {
  return std::make_unique<KeyValue>(setup);
}

}  // namespace keyhole::tools::ruler

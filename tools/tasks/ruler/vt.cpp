// Variable tracking: the task vt of RULER.
#include <algorithm>
#include <unordered_set>
#include <utility>

#include "tools/tasks/ruler/draws.h"
#include "tools/tasks/ruler/generators.h"
#include "tools/tasks/ruler/noise.h"
#include "tools/tasks/ruler/samples.h"

namespace keyhole::tools::ruler {
namespace {

constexpr std::string_view kVtTemplate =
    "Memorize and track the chain(s) of variable assignment hidden in the following "
    "text.\n\n{context}\nQuestion: Find all variables that are assigned the value {query} in the "
    "text above.";
constexpr std::string_view kVtPrefix =
    " Answer: According to the chain(s) of variable assignment in the text above, {num_v} "
    "variables are assigned the value {query}, they are: ";

constexpr size_t kHops = 4;
constexpr size_t kNameLetters = 5;
constexpr size_t kExampleLetters = 3;
constexpr size_t kExampleTokens = 500;
constexpr std::string_view kExampleValue = "12345";

/// Capitals that no other name has. RULER draws names that may repeat, and may call one VAR, which breaks a chain once
/// in some ten thousand samples.
class VtNames {
 public:
  explicit VtNames(Random& random) : random_(random), used_{"VAR"} {}
  [[nodiscard]] std::string draw(size_t letters) {
    std::string name;
    do {
      name = random_.letters(letters);
      for (char& c : name) c = static_cast<char>(c - 'a' + 'A');
    } while (!used_.insert(name).second);
    return name;
  }

 private:
  Random& random_;
  std::unordered_set<std::string> used_;
};

/// A chain hidden in `units` lines of noise, and the question.
Sample hidden_chain(Random& random, size_t units, const std::vector<std::string>& names,
                    std::string_view value) {
  std::vector<std::string> lines(units, std::string(kNoise));
  std::vector<size_t> places = distinct(random, names.size(), units);
  std::sort(places.begin(), places.end());
  for (size_t i = 0; i < names.size(); ++i) {
    const std::string line = i == 0 ? "VAR " + names[0] + " = " + std::string(value)
                                    : "VAR " + names[i] + " = VAR " + names[i - 1] + " ";
    lines.insert(lines.begin() + static_cast<std::ptrdiff_t>(places[i] + i), line);
  }
  const std::string context = replaced(joined(lines, "\n"), ". \n", ".\n");
  return {.prompt = filled(kVtTemplate, {{"context", context}, {"query", value}}),
          .prefix = filled(kVtPrefix, {{"num_v", std::to_string(names.size())}, {"query", value}}),
          .references = names};
}

std::string drawn_value(Random& random) { return decimal(random, 10000, 99999); }

/// The generator of the solved example: short names, and a value that is always replaced.
class VtExample : public Generator {
 public:
  explicit VtExample(Random& random) : random_(random) {}
  [[nodiscard]] SizeSearch size_search() const override { return {.step = 5, .probe = 5}; }
  [[nodiscard]] Sample draw(size_t /*index*/, size_t units) override {
    VtNames drawn(random_);
    std::vector<std::string> names;
    for (size_t i = 0; i <= kHops; ++i) names.push_back(drawn.draw(kExampleLetters));
    return hidden_chain(random_, units, names, kExampleValue);
  }

 private:
  Random& random_;
};

class Vt : public Generator {
 public:
  explicit Vt(const TaskSetup& setup) : random_(setup.seed), short_(setup.length < kUsualLength) {
    VtExample example(random_);
    // Vocabularies of bytes have no example as short as 500 tokens: the smallest has to do.
    const size_t units =
        std::max(find_units(example, kExampleTokens,
                            [&](const Sample& s) { return setup.count_text(s.prompt + s.prefix); }),
                 example.size_search().step);
    const Sample solved = example.draw(0, units);
    example_names_ = solved.references;
    example_ = solved.prompt + solved.prefix + " " + joined(example_names_, " ") + "\n";
  }

  [[nodiscard]] SizeSearch size_search() const override {
    const size_t step = short_ ? 5 : 10;
    return {.step = step, .probe = step, .margin = 3};
  }

  [[nodiscard]] Sample draw(size_t /*index*/, size_t units) override {
    Sample sample = draw_probe(units);
    sample.prompt = fresh_example() + "\n" + sample.prompt;
    return sample;
  }

  /// The text without the example, which does not grow with the haystack.
  [[nodiscard]] Sample draw_probe(size_t units) override {
    VtNames drawn(random_);
    std::vector<std::string> names;
    for (size_t i = 0; i <= kHops; ++i) names.push_back(drawn.draw(kNameLetters));
    return hidden_chain(random_, units, names, drawn_value(random_));
  }

 private:
  /// The example with names and value of its own, so that no sample can be answered from another's.
  [[nodiscard]] std::string fresh_example() {
    VtNames drawn(random_);
    std::string text = example_;
    // By way of numbers in braces, so that no new name is taken for an old one that is still to be replaced.
    for (size_t i = 0; i < example_names_.size(); ++i) {
      text = replaced(text, example_names_[i], "{" + std::to_string(i) + "}");
    }
    for (size_t i = 0; i < example_names_.size(); ++i) {
      text = replaced(text, "{" + std::to_string(i) + "}", drawn.draw(kExampleLetters));
    }
    return replaced(text, kExampleValue, drawn_value(random_));
  }

  Random random_;
  bool short_;
  std::string example_;
  std::vector<std::string> example_names_;
};

}  // namespace

std::unique_ptr<Generator> make_vt(const TaskSetup& setup) { return std::make_unique<Vt>(setup); }

}  // namespace keyhole::tools::ruler

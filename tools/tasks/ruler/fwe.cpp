// Frequent words of a coded text: the task fwe of RULER.
#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

#include "tools/tasks/ruler/draws.h"
#include "tools/tasks/ruler/generators.h"
#include "tools/terminal/errors.h"

namespace keyhole::tools::ruler {
namespace {

constexpr std::string_view kFweTemplate =
    "Read the following coded text and track the frequency of each coded word. Find the three most "
    "frequently appeared coded words. {context}\nQuestion: Do not provide any explanation. Please "
    "ignore the dots '....'. What are the three most frequently appeared words in the above coded "
    "text?";
constexpr std::string_view kFwePrefix =
    " Answer: According to the coded text above, the three most frequently appeared words are:";

constexpr size_t kFweAnswerTokens = 50;
constexpr size_t kCodedLetters = 6;
constexpr size_t kAsked = 3;
constexpr size_t kTokensPerCodedWord = 50;  // of the length, for each word of the vocabulary
constexpr size_t kGrowthSteps = 32;
constexpr double kZetaOf2 = 1.6449340668482264;  // pi^2 / 6

/// A unit is a step of RULER's growing text. It begins with budget / 6 words and adds budget / 32 for as long as the
/// text fits: so the number of words is budget / 6 and a multiple of budget / 32.
class Fwe : public Generator {
 public:
  explicit Fwe(const TaskSetup& setup) : seed_(setup.seed), random_(setup.seed) {
    const size_t budget = setup.length - std::min<size_t>(setup.length, kFweAnswerTokens);
    vocabulary_size_ = budget / kTokensPerCodedWord;
    if (vocabulary_size_ <= kAsked) {
      throw UsageError("the vocabulary has " + std::to_string(vocabulary_size_) +
                       " words, one in 50 tokens of the length; allowed: 4 or more");
    }
    step_ = budget / kGrowthSteps;
    first_units_ = budget / kCodedLetters / step_;
    rest_ = budget / kCodedLetters % step_;
  }

  [[nodiscard]] SizeSearch size_search() const override {
    return {.step = 1, .probe = first_units_, .margin = 3};
  }

  [[nodiscard]] Sample draw(size_t /*index*/, size_t units) override {
    const std::vector<std::string> words = vocabulary();
    const auto tokens = static_cast<double>(rest_ + units * step_);
    std::vector<std::string> text;
    for (size_t i = 0; i < words.size(); ++i) {
      const auto rank = static_cast<double>(i + 1);
      text.insert(text.end(), static_cast<size_t>(tokens * std::pow(rank, -2.0) / kZetaOf2),
                  words[i]);
    }
    Random fixed(seed_);
    shuffle(fixed, text);
    return {.prompt = filled(kFweTemplate, {{"context", joined(text, " ")}}),
            .prefix = std::string(kFwePrefix),
            .references = {words.begin() + 1, words.begin() + 1 + kAsked}};
  }

 private:
  /// Coded words by rank; the first is noise.
  [[nodiscard]] std::vector<std::string> vocabulary() {
    std::set<std::string> different;
    while (different.size() < vocabulary_size_) different.insert(random_.letters(kCodedLetters));
    std::vector<std::string> words(different.begin(), different.end());
    Random fixed(seed_);
    shuffle(fixed, words);
    words.front() = "...";
    return words;
  }

  uint64_t seed_;
  Random random_;
  size_t vocabulary_size_ = 0;
  size_t step_ = 0, first_units_ = 0, rest_ = 0;
};

}  // namespace

std::unique_ptr<Generator> make_fwe(const TaskSetup& setup) { return std::make_unique<Fwe>(setup); }

}  // namespace keyhole::tools::ruler

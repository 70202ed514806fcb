// Needles in a haystack: eight tasks of RULER.
#include <algorithm>
#include <cmath>
#include <utility>

#include "tools/tasks/ruler/draws.h"
#include "tools/tasks/ruler/essay.h"
#include "tools/tasks/ruler/generators.h"
#include "tools/tasks/ruler/noise.h"
#include "tools/tasks/ruler/word_lists.h"

namespace keyhole::tools::ruler {
namespace {

constexpr std::string_view kNiahTemplate =
    "Some special magic {type_needle_v} are hidden within the following text. Make sure to "
    "memorize it. I will quiz you about the {type_needle_v} afterwards.\n{context}\nWhat are all "
    "the special magic {type_needle_v} for {query} mentioned in the provided text?";
constexpr std::string_view kNiahPrefix =
    " The special magic {type_needle_v} for {query} mentioned in the provided text are";
constexpr std::string_view kNeedle =
    "One of the special magic {type_needle_v} for {key} is: {value}.";

/// The plural in which needles, and questions about several, name the values.
std::string_view plural(Kind kind) {
  switch (kind) {
    case Kind::words: return "words";
    case Kind::numbers: return "numbers";
    default: return "uuids";
  }
}

/// A template about one value in the singular: RULER replaces these words wherever they stand in the whole string.
std::string singular(std::string_view text) {
  std::string out = replaced(text, "Some", "A");
  out = replaced(out, "are all", "is");
  out = replaced(out, "are", "is");
  return replaced(out, "answers", "answer");
}

/// The percentages of the text at which needles of an essay may stand: 40 from 0 to 100, evenly, rounded.
std::vector<size_t> depths() {
  constexpr size_t kDepths = 40;
  std::vector<size_t> out(kDepths);
  for (size_t i = 0; i < kDepths; ++i) {
    out[i] = static_cast<size_t>(std::lround(100.0 * static_cast<double>(i) / (kDepths - 1)));
  }
  return out;
}

class Niah : public Generator {
 public:
  Niah(const NiahShape& shape, const TaskSetup& setup)
      : shape_(shape),
        seed_(setup.seed),
        random_(setup.seed),
        short_(setup.length < kUsualLength),
        prompt_(kNiahTemplate),
        prefix_(kNiahPrefix),
        asked_type_(plural(shape.value)) {
    if (shape.haystack == Haystack::essay) essay_.emplace_back(setup.prose);
    if (shape.queries * shape.values == 1) {
      prompt_ = singular(prompt_);
      prefix_ = singular(prefix_);
      asked_type_.pop_back();
    }
  }

  [[nodiscard]] SizeSearch size_search() const override {
    const size_t step = shape_.haystack == Haystack::essay ? 500 : short_ ? 5 : 25;
    return {.step = step, .probe = step, .margin = 3};
  }

  [[nodiscard]] Sample draw(size_t /*index*/, size_t units) override {
    const size_t count = std::max(shape_.keys, shape_.queries);
    std::vector<std::string> keys;
    std::vector<std::vector<std::string>> values(count);
    std::vector<std::string> needles;
    for (std::vector<std::string>& of_key : values) {
      keys.push_back(value_of(shape_.key));
      for (size_t v = 0; v < shape_.values; ++v) {
        of_key.push_back(value_of(shape_.value));
        needles.push_back(needle(keys.back(), of_key.back()));
      }
    }
    // The same order in every sample: RULER shuffles by a generator that begins with the seed each time.
    Random fixed(seed_);
    shuffle(fixed, needles);
    const std::string context =
        shape_.haystack == Haystack::essay ? in_essay(units, needles) : in_lines(units, needles);

    Sample sample;
    std::vector<std::string> asked;
    for (const size_t key : distinct(random_, shape_.queries, count)) {
      asked.push_back(keys[key]);
      sample.references.insert(sample.references.end(), values[key].begin(), values[key].end());
    }
    std::string query = asked.back();
    if (asked.size() > 1) {
      asked.pop_back();
      query = joined(asked, ", ") + ", and " + query;
    }
    sample.prompt =
        filled(prompt_, {{"type_needle_v", asked_type_}, {"context", context}, {"query", query}});
    sample.prefix = filled(prefix_, {{"type_needle_v", asked_type_}, {"query", query}});
    return sample;
  }

 private:
  [[nodiscard]] std::string value_of(Kind kind) {
    if (kind == Kind::numbers) return decimal(random_, 1'000'000, 10'000'000);
    if (kind == Kind::uuids) return uuid(random_);
    // Evenly among all pairs.
    const std::string& first = adjectives()[random_.below(adjectives().size())];
    return first + "-" + nouns()[random_.below(nouns().size())];
  }

  [[nodiscard]] std::string needle(std::string_view key, std::string_view value) const {
    return filled(kNeedle,
                  {{"type_needle_v", plural(shape_.value)}, {"key", key}, {"value", value}});
  }

  /// Lines of noise or of other needles, with the needles in front of random ones.
  [[nodiscard]] std::string in_lines(size_t units, const std::vector<std::string>& needles) {
    std::vector<std::string> lines;
    for (size_t i = 0; i < units; ++i) {
      if (shape_.haystack == Haystack::noise) {
        lines.emplace_back(kNoise);
      } else {
        const std::string key = value_of(shape_.key);
        lines.push_back(needle(key, value_of(shape_.value)));
      }
    }
    std::vector<size_t> places = distinct(random_, needles.size(), units);
    std::sort(places.begin(), places.end());
    // The last place first, so that what is inserted moves no place.
    for (size_t i = 0; i < places.size(); ++i) {
      const auto place = static_cast<std::ptrdiff_t>(places[places.size() - 1 - i]);
      lines.insert(lines.begin() + place, needles[i]);
    }
    return joined(lines, "\n");
  }

  /// Words of the essay with the needles between sentences.
  [[nodiscard]] std::string in_essay(size_t units, const std::vector<std::string>& needles) {
    const std::vector<std::string> all = sentences(essay_.front().words(units));
    std::vector<size_t> places;
    const std::vector<size_t> percents = depths();
    for (const size_t i : distinct(random_, needles.size(), percents.size())) {
      const double depth = static_cast<double>(percents[i]) / 100.0;
      places.push_back(static_cast<size_t>(static_cast<double>(all.size()) * depth));
    }
    std::sort(places.begin(), places.end());
    places.push_back(all.size());
    std::vector<std::string> parts;
    size_t done = 0;
    for (size_t i = 0; i < places.size(); ++i) {
      const auto at = [&](size_t n) { return all.begin() + static_cast<std::ptrdiff_t>(n); };
      // Where no sentence lies between two places the part is empty, and the blanks around it stay, as in RULER.
      parts.push_back(joined({at(done), at(places[i])}, " "));
      if (i < needles.size()) parts.push_back(needles[i]);
      done = places[i];
    }
    return joined(parts, " ");
  }

  NiahShape shape_;
  uint64_t seed_;
  Random random_;
  bool short_;
  std::string prompt_, prefix_, asked_type_;
  std::vector<Essay> essay_;  // one, or none
};

}  // namespace

std::unique_ptr<Generator> make_niah(const NiahShape& shape, const TaskSetup& setup) {
  return std::make_unique<Niah>(shape, setup);
}

}  // namespace keyhole::tools::ruler

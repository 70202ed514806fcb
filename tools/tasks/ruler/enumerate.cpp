// Enumeration in order: the task enumerate.
#include <algorithm>
#include <array>
#include <utility>

#include "tools/tasks/ruler/draws.h"
#include "tools/tasks/ruler/generators.h"
#include "tools/tasks/ruler/word_lists.h"

namespace keyhole::tools::ruler {
namespace {

constexpr std::string_view kEnumerateTemplate =
    "A list of things and their colours follows. Memorize it.\n{context}\nQuestion: Which things "
    "in "
    "the list are {colour}? Name all of them in the order in which they stand there.";
constexpr std::string_view kEnumeratePrefix =
    " Answer: The {colour} things, in the order of the list, are:";
constexpr std::string_view kColoured = "The {thing} is {colour}.";

constexpr std::array<std::string_view, 8> kColours = {"red",   "blue",  "green", "yellow",
                                                      "black", "white", "brown", "grey"};
constexpr size_t kAskedThings = 8;

class EnumerateGenerator : public Generator {
 public:
  explicit EnumerateGenerator(const TaskSetup& setup) : random_(setup.seed) {}

  [[nodiscard]] SizeSearch size_search() const override {
    return {.step = 16, .probe = 16, .margin = 3};
  }

  [[nodiscard]] Sample draw(size_t /*index*/, size_t units) override {
    const std::vector<std::string> things = distinct_pairs(random_, units);
    const size_t asked = random_.below(kColours.size());
    std::vector<size_t> places = distinct(random_, kAskedThings, units);
    std::sort(places.begin(), places.end());
    std::vector<std::string> lines, references;
    for (size_t i = 0; i < units; ++i) {
      const bool named = references.size() < kAskedThings && places[references.size()] == i;
      if (named) references.push_back(things[i]);
      // One of the other colours is so many places behind the asked one.
      const size_t colour = named ? asked : asked + 1 + random_.below(kColours.size() - 1);
      lines.push_back(filled(
          kColoured, {{"thing", things[i]}, {"colour", kColours[colour % kColours.size()]}}));
    }
    return {.prompt = filled(kEnumerateTemplate,
                             {{"context", joined(lines, "\n")}, {"colour", kColours[asked]}}),
            .prefix = filled(kEnumeratePrefix, {{"colour", kColours[asked]}}),
            .references = references};
  }

 private:
  Random random_;
};

}  // namespace

std::unique_ptr<Generator> make_enumerate(const TaskSetup& setup) {
  return std::make_unique<EnumerateGenerator>(setup);
}

}  // namespace keyhole::tools::ruler

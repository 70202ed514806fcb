// What a benchmark asks: a prompt of its own for every sample, and the interface of what makes them.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace keyhole::tools::ruler {

/// A question behind the right answer to the one before it, in the same session.
struct FollowUp {
  /// What the user says; empty: the prefix goes on in the same answer, which then is a list that the model continues.
  std::string prompt;
  std::string prefix;                   ///< as in Sample
  std::vector<std::string> references;  ///< as in Sample
  std::string answer;                   ///< as in Sample
};

/// One prompt and what is asked for.
struct Sample {
  std::string
      prompt;  ///< everything in front of the answer's beginning; in a chat it is what the user says
  std::string prefix;                   ///< the beginning of the answer, which the model continues
  std::vector<std::string> references;  ///< what a right answer contains, see Scoring
  /// The right answer behind the prefix, with which the session goes on, whatever was answered; empty where nothing
  /// follows.
  std::string answer = {};
  std::vector<FollowUp> follow_ups = {};  ///< in the order in which they are asked
};

/// How the number of a haystack's units (words, lines, documents) is found, see Samples.
struct SizeSearch {
  size_t step = 1;    ///< the least units, and how many fewer a sample has that turned out too long
  size_t probe = 1;   ///< units of the text by which tokens per unit are estimated
  size_t margin = 3;  ///< the most units tried, as a multiple of the estimate
};

/// Makes the samples of one task for one length. Everything that is drawn comes from one seed, in the order of calls.
class Generator {
 public:
  Generator() = default;
  virtual ~Generator() = default;
  Generator(const Generator&) = delete;
  Generator& operator=(const Generator&) = delete;

  [[nodiscard]] virtual SizeSearch size_search() const = 0;
  /// Draws sample `index` with a haystack of `units`, at least size_search().step. Only tasks that walk through a
  /// list of questions or places read the index.
  [[nodiscard]] virtual Sample draw(size_t index, size_t units) = 0;
  /// Draws a text whose tokens divided by `units` estimate the tokens of a unit.
  [[nodiscard]] virtual Sample draw_probe(size_t units) { return draw(0, units); }
};

}  // namespace keyhole::tools::ruler

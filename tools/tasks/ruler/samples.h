// Samples that fill a length and never exceed it.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "tools/tasks/ruler/sample.h"

namespace keyhole::tools::ruler {

/// The samples of one task. The size of the haystack is found once, by a binary search between the generator's step
/// and a multiple of an estimate; every sample then draws anew, and with a step less for as long as it is too long.
class Samples {
 public:
  /// The number of tokens of a sample's whole prompt: all that a chat template or the vocabulary puts around it, and
  /// the beginning of the answer, are counted.
  using CountTokens = std::function<size_t(const Sample&)>;

  /// `budget`: the most tokens of a prompt. Throws UsageError, which names the numbers, where not even the smallest
  /// haystack fits; the name of the task is up to the caller.
  Samples(std::unique_ptr<Generator> generator, size_t budget, CountTokens count);

  /// The next sample. Throws UsageError where a hundred draws of the smallest haystack were all too long.
  [[nodiscard]] Sample next();
  /// The units of a sample's haystack, before any step less.
  [[nodiscard]] size_t units() const { return units_; }

 private:
  std::unique_ptr<Generator> generator_;
  size_t budget_;
  CountTokens count_;
  size_t units_ = 0;
  size_t drawn_ = 0;
};

/// The most units of those tried whose sample has at most `budget` tokens; 0 where none has.
[[nodiscard]] size_t find_units(Generator& generator, size_t budget,
                                const Samples::CountTokens& count);

}  // namespace keyhole::tools::ruler

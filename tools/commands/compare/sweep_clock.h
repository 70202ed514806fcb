// The progress of a sweep and the time that it still takes, judged by the time that its parts have taken so far.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace keyhole::tools {

/// A clock of work in a known order: truths, builds, measurements. A part that was done before, over other heads, is
/// expected to take as long again; others the mean of their kind, else of all. Not thread-safe.
class SweepClock {
 public:
  struct Part {
    std::string kind;  ///< e.g. "build hnsw"
    std::string what;  ///< the same for the same work over other heads, e.g. "hnsw:M=32"
    double steps = 1;  ///< it is done after so many: one for each head
  };
  explicit SweepClock(std::vector<Part> parts);

  /// Takes in that `steps` more of the current part are done, `seconds` after the beginning; what exceeds it counts
  /// for the next part.
  void done(double steps, double seconds);
  /// The share of the time that is over: seconds / (seconds + what is left). 0 before the first step, 1 behind the
  /// last.
  [[nodiscard]] double fraction(double seconds) const;
  /// The part that is being worked on; "" behind the last.
  [[nodiscard]] const std::string& current() const;

 private:
  struct Known {
    double steps = 0, seconds = 0;
  };
  [[nodiscard]] double seconds_of(const Part& part) const;

  std::vector<Part> parts_;
  std::vector<double> took_;  // seconds of the parts that are done
  size_t at_ = 0;             // the current part
  double steps_ = 0;          // of it that are done
  double began_ = 0;
};

}  // namespace keyhole::tools

// How far a sweep is and how long it will still take, judged by the time that its parts took so far.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace keyhole::tools {

/// Work in a known order: truths, builds, measurements. A part that was done before, over other heads, will take as long
/// again; one that was not takes the mean of those of its kind, else of all. Not thread-safe.
class SweepClock {
 public:
  struct Part {
    std::string kind;  ///< e.g. "build hnsw"
    std::string what;  ///< the same for the same work over other heads, e.g. "hnsw:M=32"
    double steps = 1;  ///< it is done after so many: one for each head
  };
  explicit SweepClock(std::vector<Part> parts);

  /// `steps` more of the current part are done, `seconds` after the beginning; then of the next one.
  void done(double steps, double seconds);
  /// seconds / (seconds + what is left): the share of the time that is over. 0 before the first step, 1 behind the last.
  [[nodiscard]] double fraction(double seconds) const;
  /// What is being worked on, "" behind the last.
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

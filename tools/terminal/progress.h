// A progress bar on stderr for work that takes a while.
#pragma once

#include <chrono>
#include <mutex>
#include <string>

namespace keyhole::tools {

/// A progress bar. It shows nothing in the first two seconds and nothing at all unless stderr is a terminal; it
/// redraws at most ten times a second and removes itself when it is destroyed. Any thread may call it.
class Progress {
 public:
  explicit Progress(std::string title);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// Shows that `fraction` of the work is done, 0..1.
  void update(double fraction);
  /// update() with another title, e.g. the part that is being worked on.
  void update(double fraction, const std::string& title);

 private:
  using Clock = std::chrono::steady_clock;
  void draw(double fraction);

  std::mutex mutex_;
  std::string title_;
  const bool terminal_;
  const Clock::time_point start_;
  Clock::time_point drawn_;
  bool visible_ = false;
};

/// While one lives, no bar of the program shows: a bar takes the terminal's line, which may have a part of an answer
/// in it. Any thread may make one.
class HiddenProgress {
 public:
  HiddenProgress();
  ~HiddenProgress();
  HiddenProgress(const HiddenProgress&) = delete;
  HiddenProgress& operator=(const HiddenProgress&) = delete;
};

/// The bar as text, at most `columns` wide: title, bar, percent, time left (once it is known).
[[nodiscard]] std::string progress_line(const std::string& title, double fraction,
                                        double elapsed_seconds, size_t columns, bool unicode);

}  // namespace keyhole::tools

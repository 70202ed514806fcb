#include "tools/terminal/progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <utility>

#include "tools/terminal/style.h"
#include "tools/terminal/units.h"

namespace keyhole::tools {
namespace {

constexpr auto kPatience = std::chrono::seconds(2);
constexpr auto kRedraw = std::chrono::milliseconds(100);
constexpr size_t kBarWidth = 30;

std::atomic<int> hidden{0};  // HiddenProgress objects that there are

size_t terminal_columns() {
  winsize size{};
  if (ioctl(STDERR_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return 80;
  return size.ws_col;
}

}  // namespace

std::string progress_line(const std::string& title, double fraction, double elapsed_seconds,
                          size_t columns, bool unicode) {
  fraction = std::clamp(std::isfinite(fraction) ? fraction : 0.0, 0.0, 1.0);
  const auto filled = static_cast<size_t>(fraction * static_cast<double>(kBarWidth));
  std::string bar;
  for (size_t i = 0; i < kBarWidth; ++i) {
    bar += i < filled ? (unicode ? "\xe2\x96\x88" : "#") : (unicode ? "\xe2\x96\x91" : ".");
  }
  char percent[8];
  std::snprintf(percent, sizeof percent, "%3.0f%%", 100.0 * fraction);
  std::string tail = std::string(" ") + percent;
  // Under 2 % the extrapolation is guesswork.
  if (fraction >= 0.02 && fraction < 1.0) {
    tail += "  " + format_duration(elapsed_seconds * (1.0 - fraction) / fraction) + " left";
  }
  const size_t fixed = 1 + kBarWidth + tail.size();
  if (columns < fixed + 4) return tail.substr(1, columns);
  return title.substr(0, columns - fixed) + " " + bar + tail;
}

HiddenProgress::HiddenProgress() { ++hidden; }
HiddenProgress::~HiddenProgress() { --hidden; }

Progress::Progress(std::string title)
    : title_(std::move(title)),
      terminal_(isatty(STDERR_FILENO) != 0),
      start_(Clock::now()),
      drawn_(start_) {}

Progress::~Progress() {
  if (visible_) std::fputs("\r\033[K", stderr);
}

void Progress::update(double fraction) {
  if (!terminal_) return;
  const std::lock_guard lock(mutex_);
  draw(fraction);
}

void Progress::update(double fraction, const std::string& title) {
  if (!terminal_) return;
  const std::lock_guard lock(mutex_);
  title_ = title;
  draw(fraction);
}

void Progress::draw(double fraction) {
  const Clock::time_point now = Clock::now();
  if (now - start_ < kPatience || now - drawn_ < kRedraw || hidden != 0) return;
  drawn_ = now;
  visible_ = true;
  const double elapsed = std::chrono::duration<double>(now - start_).count();
  const std::string line =
      progress_line(title_, fraction, elapsed, terminal_columns() - 1, style_of(stderr).unicode);
  std::fprintf(stderr, "\r\033[K%s", line.c_str());
  std::fflush(stderr);
}

}  // namespace keyhole::tools

#include "tools/commands/compare/sweep_clock.h"

#include <algorithm>
#include <utility>

namespace keyhole::tools {

SweepClock::SweepClock(std::vector<Part> parts) : parts_(std::move(parts)) {
  std::erase_if(parts_, [](const Part& part) { return part.steps <= 0; });
}

void SweepClock::done(double steps, double seconds) {
  // Shares of several threads add up to a whole but for rounding.
  constexpr double kRounding = 1e-6;
  steps_ += steps;
  while (at_ < parts_.size() && steps_ >= parts_[at_].steps - kRounding) {
    steps_ = std::max(steps_ - parts_[at_].steps, 0.0);
    took_.push_back(seconds - began_);
    began_ = seconds;
    ++at_;
  }
}

double SweepClock::seconds_of(const Part& part) const {
  Known same, kind, all;
  for (size_t i = 0; i < took_.size(); ++i) {
    const Part& past = parts_[i];
    const auto add = [&](Known& known) {
      known.steps += past.steps;
      known.seconds += took_[i];
    };
    add(all);
    if (past.kind != part.kind) continue;
    add(kind);
    if (past.what == part.what) add(same);
  }
  for (const Known& known : {same, kind, all}) {
    if (known.steps > 0) return part.steps * known.seconds / known.steps;
  }
  return 0;
}

double SweepClock::fraction(double seconds) const {
  if (at_ == parts_.size()) return 1;
  if (took_.empty() && steps_ <= 0) return 0;
  // The current part by its own pace once there is one, else by what such parts took.
  const Part& current = parts_[at_];
  const double spent = seconds - began_;
  const double share = steps_ / current.steps;
  double left = took_.empty() || share > 0.05 ? spent * (1 - share) / std::max(share, 1e-9)
                                              : std::max(seconds_of(current) - spent, 0.0);
  // With nothing done before, the parts behind the current one are taken to go on at its pace.
  const double pace = (spent + left) / current.steps;
  for (size_t i = at_ + 1; i < parts_.size(); ++i) {
    left += took_.empty() ? pace * parts_[i].steps : seconds_of(parts_[i]);
  }
  return seconds <= 0 ? 0 : seconds / (seconds + left);
}

const std::string& SweepClock::current() const {
  static const std::string kNothing;
  return at_ == parts_.size() ? kNothing : parts_[at_].what;
}

}  // namespace keyhole::tools

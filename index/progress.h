// Progress and cancellation of a build whose pieces may run on several threads.
#pragma once

#include <algorithm>
#include <mutex>

#include "index/index.h"

namespace keyhole::index {

/// Counts finished work and asks the caller's callback whether to go on. Thread-safe; the callback is
/// called by one thread at a time with a share that never falls.
class ProgressMeter {
 public:
  /// `total` is the whole work, in any unit that advance() uses.
  ProgressMeter(const Progress& progress, double total) : progress_(progress), total_(total) {}

  ProgressMeter(Progress&&, double) = delete;  // it is borrowed

  /// Adds finished work. Throws Error(cancelled), on whichever thread comes next, once the callback has asked to
  /// stop.
  void advance(double work) {
    if (!progress_) return;
    const std::lock_guard lock(mutex_);
    done_ += work;
    if (!cancelled_) cancelled_ = !progress_(total_ > 0 ? std::min(done_ / total_, 1.0) : 1.0);
    if (cancelled_) throw Error(Status::cancelled, "the index build was cancelled by its caller");
  }

 private:
  const Progress& progress_;
  double total_;
  double done_ = 0.0;
  bool cancelled_ = false;
  std::mutex mutex_;
};

}  // namespace keyhole::index

// Builds of several heads at once.
#pragma once

#include <functional>
#include <future>
#include <vector>

#include "tools/terminal/interrupt.h"

namespace keyhole::tools {

/// Runs n tasks with a thread for each, the caller's among them. Throws what the first of them threw, but Interrupted
/// before that.
template <class Task>
void side_by_side(size_t n, const Task& task) {
  std::vector<std::future<void>> runs;
  for (size_t i = 0; i < n; ++i) {
    // The first waits for the caller, who runs it by waiting for it.
    const auto when = i == 0 ? std::launch::deferred : std::launch::async;
    runs.push_back(std::async(when, std::cref(task), i));
  }
  for (const std::future<void>& run : runs) run.wait();
  // The library reports a cancelled build; that the user interrupted it is reported first.
  throw_if_interrupted();
  for (std::future<void>& run : runs) run.get();
}

}  // namespace keyhole::tools

// Builds of several heads at once.
#pragma once

#include <exception>
#include <thread>
#include <vector>

#include "tools/terminal/interrupt.h"

namespace keyhole::tools {

/// Runs n tasks with a thread for each, the caller's among them. Throws what the first of them threw, but Interrupted
/// before that.
template <class Task>
void side_by_side(size_t n, const Task& task) {
  std::vector<std::exception_ptr> errors(n);
  const auto guarded = [&](size_t i) {
    try {
      task(i);
    } catch (...) {
      errors[i] = std::current_exception();
    }
  };
  {
    std::vector<std::jthread> threads;
    for (size_t i = 1; i < n; ++i) threads.emplace_back(guarded, i);
    guarded(0);
  }
  // The library reports a cancelled build; that the user interrupted it is reported first.
  throw_if_interrupted();
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

}  // namespace keyhole::tools

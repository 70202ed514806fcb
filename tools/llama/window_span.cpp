#include "tools/llama/window_span.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace keyhole::tools {

size_t WindowSpan::slots_of(size_t window, uint32_t max_tokens) {
  const size_t slots = window + kSlack;
  return max_tokens == 0 ? slots : std::min<size_t>(slots, max_tokens);
}

void WindowSpan::check_room(size_t tokens, uint32_t max_tokens) {
  if (max_tokens == 0 || tokens <= max_tokens) return;
  throw std::runtime_error("a sequence of " + std::to_string(tokens) +
                           " tokens; allowed: " + std::to_string(max_tokens) + " (max_tokens)");
}

void WindowSpan::add(size_t tokens) {
  count += tokens;
  if (count > slots) oldest = std::max(oldest, count - slots);
}

void WindowSpan::check_truncation(size_t tokens) const {
  // The next token attends to itself and the window - 1 before it.
  if (tokens == 0 || tokens >= count || oldest == 0 || tokens + 1 >= oldest + window) return;
  throw std::runtime_error("the sequence cannot be cut to " + std::to_string(tokens) +
                           " tokens: layers with a sliding window of " + std::to_string(window) +
                           " hold tokens " + std::to_string(oldest) + " to " +
                           std::to_string(count - 1) +
                           "; allowed: " + std::to_string(oldest + window - 1) + " or more");
}

void WindowSpan::truncate(size_t tokens) {
  count = std::min(count, tokens);
  // Nothing to attend to: a ring that has turned can begin again.
  if (tokens == 0) oldest = 0;
}

}  // namespace keyhole::tools

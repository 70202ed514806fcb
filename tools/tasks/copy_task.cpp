#include "tools/tasks/copy_task.h"

#include <algorithm>

#include "tools/tasks/random.h"
#include "tools/terminal/errors.h"

namespace keyhole::tools {
namespace {

// While half of the context is free, a place is refused for its neighbours at most three times out of four or so.
constexpr size_t kTries = 1000;

bool occurs_once(const std::string& context, std::string_view cue) {
  return context.find(cue) == context.rfind(cue);
}

/// Where a passage may begin beside the others, or npos where no place was found.
size_t find_place(Random& random, const CopyTask& task) {
  for (size_t i = 0; i < kTries; ++i) {
    const size_t place = random.below(task.context.size() - kCopyBytes + 1);
    const bool overlaps =
        std::any_of(task.passages.begin(), task.passages.end(), [place](const CopyPassage& other) {
          return place < other.place + kCopyBytes && other.place < place + kCopyBytes;
        });
    const auto cue = std::string_view(task.context).substr(place, kCopyCueBytes);
    if (!overlaps && occurs_once(task.context, cue)) return place;
  }
  return std::string::npos;
}

}  // namespace

size_t max_copy_passages(size_t context_bytes) { return context_bytes / (2 * kCopyBytes); }

CopyTask make_copy_task(const CopyTaskOptions& options) {
  const size_t most = max_copy_passages(options.context_bytes);
  if (options.passages < 1 || options.passages > most) {
    throw UsageError("questions is " + std::to_string(options.passages) + "; allowed: 1 to " +
                     std::to_string(most) + ", passages of " + std::to_string(kCopyBytes) +
                     " bytes in half of a context of " + std::to_string(options.context_bytes));
  }
  if (options.haystack.size() < options.context_bytes) {
    throw UsageError("the haystack has " + std::to_string(options.haystack.size()) +
                     " bytes; allowed: " + std::to_string(options.context_bytes) +
                     " or more, as prose that is repeated has passages twice");
  }
  Random random(options.seed);
  CopyTask task;
  const size_t start = random.below(options.haystack.size() - options.context_bytes + 1);
  task.context = options.haystack.substr(start, options.context_bytes);
  while (task.passages.size() < options.passages) {
    const size_t place = find_place(random, task);
    if (place == std::string::npos) {
      throw UsageError("only " + std::to_string(task.passages.size()) + " of " +
                       std::to_string(options.passages) +
                       " passages were found that begin as no other: the prose repeats itself");
    }
    task.passages.push_back({place, task.context.substr(place, kCopyBytes)});
  }
  return task;
}

}  // namespace keyhole::tools

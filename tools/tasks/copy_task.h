// The copy task: passages of long prose, each to be written down once more, byte by byte.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace keyhole::tools {

/// Number of bytes of a passage.
inline constexpr size_t kCopyBytes = 160;
/// Number of these bytes that say which passage it is, as in the prompts that the bundled model was trained on: `<<`
/// and 24 bytes of an earlier passage, continued to `>>`. Without them nobody can know.
inline constexpr size_t kCopyCueBytes = 24;
/// The text that asks for a passage.
inline constexpr std::string_view kCopyPrompt = "\n<<";

struct CopyTaskOptions {
  size_t context_bytes = 0;  ///< exactly, all of it prose
  size_t passages = 1;
  uint64_t seed = 0;
  std::string_view haystack;  ///< the prose, begun at a random place; at least context_bytes
};

/// One passage. A needle is found once; here every byte has a place of its own in the context, and the next byte's
/// place follows it. So this asks for attention that stays sharp for a whole passage.
struct CopyPassage {
  size_t place = 0;  ///< of its first byte in the context
  std::string text;
};

struct CopyTask {
  std::string context;
  std::vector<CopyPassage> passages;  ///< in random order
};

/// The most passages of a context of this size: they take half of it at most.
[[nodiscard]] size_t max_copy_passages(size_t context_bytes);

/// Makes the task. Passages lie anywhere and do not overlap, and no cue occurs a second time in the context. The same
/// options give the same task on every platform. Throws UsageError for more passages than max_copy_passages, and for
/// prose that is shorter than the context or repeats itself so much that there are not enough cues.
[[nodiscard]] CopyTask make_copy_task(const CopyTaskOptions& options);

}  // namespace keyhole::tools

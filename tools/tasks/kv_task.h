// The kv task: lines `key=value` of random letters and digits. Nothing but retrieval solves it.
#pragma once

#include <cstdint>

#include "tools/tasks/task.h"

namespace keyhole::tools {

/// The options. Lines are `key=12345` or `key=@earlier`, where `earlier` is the key of a line above; keys are 5
/// lower-case letters and all different. A question is `?key=`; its answer is the value and a line end, with pointers
/// followed: `?girks=@brqmc=95529`.
struct KvTaskOptions {
  size_t context_bytes = 0;  ///< at most this many, of which fewer than 13 stay unused
  size_t questions = 1;      ///< about different keys, drawn evenly from all lines
  uint64_t seed = 0;
  uint32_t pointer_percent =
      18;  ///< the share in the prompts that the bundled model was trained on
};

/// Number of bytes of a question's prompt.
inline constexpr size_t kKvQuestionBytes = 7;

/// The least number of lines, and so of different questions, of a context of this size.
[[nodiscard]] size_t min_kv_lines(size_t context_bytes);

/// Makes the task. The same options give the same task on every platform. Throws UsageError for a context too short
/// for a line or of more than 2^26 bytes, and for more questions than lines.
[[nodiscard]] Task make_kv_task(const KvTaskOptions& options);

}  // namespace keyhole::tools

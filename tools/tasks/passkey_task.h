// The pass-key task: sentences with a number each, hidden at random places of prose.
#pragma once

#include <cstdint>
#include <string_view>

#include "tools/tasks/task.h"

namespace keyhole::tools {

/// The options. `[The pass key of NAME is DIGITS.]` stands on lines of their own between stretches of prose; names
/// have 4 to 7 lower-case letters and are all different, numbers have 5 to 7 digits. A question is the line
/// `[Question: what is the pass key of NAME? Answer: `; its answer is `DIGITS.]`.
struct PasskeyTaskOptions {
  size_t context_bytes = 0;  ///< exactly
  size_t questions = 1;      ///< one pass key is hidden for each
  uint64_t seed = 0;
  std::string_view haystack;  ///< the prose; begun at a random place, repeated if it is too short
};

/// The longest prompt of a question in bytes.
inline constexpr size_t kMaxPasskeyQuestionBytes = 53;

/// The most pass keys of a context of this size: one in 256 bytes, so that prose prevails.
[[nodiscard]] size_t max_passkeys(size_t context_bytes);

/// Makes the task. The same options give the same task on every platform. Throws UsageError for more questions than
/// max_passkeys and for a haystack that is empty.
[[nodiscard]] Task make_passkey_task(const PasskeyTaskOptions& options);

}  // namespace keyhole::tools

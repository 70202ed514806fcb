// Tasks in the manner of RULER (Hsieh et al. 2024): more than one fact has to be found, followed or counted.
#pragma once

#include <cstdint>
#include <string_view>

#include "tools/tasks/task.h"

namespace keyhole::tools {

/// The kind of question.
enum class RulerKind : uint8_t {
  needles,  ///< all of the kRulerNeedles numbers that a name has, each in a sentence of its own in prose
  variables,  ///< all variables of a chain of kRulerChain assignments (`VAR A = 12345`, `VAR B = VAR A`, ...), in prose
  words,  ///< the kRulerWords most frequent words of a list whose lines stand between those of others; no prose
};
inline constexpr size_t kRulerNeedles = 4;
inline constexpr size_t kRulerChain = 5;
inline constexpr size_t kRulerWords = 3;

struct RulerTaskOptions {
  RulerKind kind = RulerKind::needles;
  size_t context_bytes = 0;  ///< exactly; words: a few less
  size_t questions = 1;      ///< names, chains or lists, one question each
  uint64_t seed = 0;
  std::string_view
      haystack;  ///< the prose, begun at a random place, repeated if it is too short; of words: none
};

/// The most questions of a context of this size: one in 1024 bytes.
[[nodiscard]] size_t max_ruler_questions(size_t context_bytes);

/// Makes the task. An answer is free text that contains all of a question's values; `answer` is empty. A frequent
/// word occurs at least twice as often as any other of its list. The same options give the same task on every
/// platform. Throws UsageError for more questions than max_ruler_questions, and for a haystack that is empty where
/// prose is needed.
[[nodiscard]] Task make_ruler_task(const RulerTaskOptions& options);

}  // namespace keyhole::tools

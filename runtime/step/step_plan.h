// The tasks of a step. They depend on the shape, the token counts and the number of threads; the result does not
// depend on the number of threads.
//
// A model with few KV heads has too few searches for many threads, so searches are cut into parts. The last part of a
// head to end merges what all have found and attends to it; parts that score all their keys for good attend to their
// own.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "runtime/step/head_work.h"
#include "runtime/step/query.h"

namespace keyhole::runtime {

/// The most tasks of a KV head that attend rows exactly.
inline constexpr uint32_t kMaxChunks = 64;

/// The tasks of one KV head.
struct HeadPlan {
  uint32_t parts = 0;  ///< parts of its search
  bool merges_hits =
      false;            ///< the parts' hits are merged before they are attended: one state for all
  uint32_t ranks = 0;   ///< parts of the choice among lists of codes, before any of their scans
  uint32_t codes = 0;   ///< parts of the pass over the codes of all rows, or of the chosen lists
  uint32_t chunks = 0;  ///< tasks that attend rows exactly
  uint32_t chunk_rows = 0;                   ///< rows of each chunk but the last
  uint32_t first_code = 0, first_chunk = 0;  ///< the first ones with a task, see HeadWork::common

  /// Number of parts of the pass over codes that are still to end. The last part has a task even if its state is
  /// there: to end the pass.
  [[nodiscard]] uint32_t code_tasks() const { return codes - first_code; }
  [[nodiscard]] uint32_t tasks() const {
    return parts + ranks + code_tasks() + chunks - first_chunk;
  }
  /// Number of states that the parts leave.
  [[nodiscard]] uint32_t part_states() const { return merges_hits || codes != 0 ? 1 : parts; }
};

struct StepTask {
  enum class Kind : uint8_t { search, ranks, codes, exact };
  Kind kind;
  uint32_t kv_head;
  uint32_t number;  ///< of the part, or of the chunk
};

class StepPlan {
 public:
  /// Plans for steps of fewest..most KV heads.
  StepPlan(uint32_t fewest, uint32_t most, uint32_t threads);

  /// Plans a step with one work for each KV head and groups of `group` query heads; allocates nothing.
  void make(std::span<const HeadWork> works, uint32_t group);

  [[nodiscard]] const HeadPlan& head(uint32_t kv_head) const { return heads_[kv_head]; }
  /// The tasks in the order in which they are to begin.
  [[nodiscard]] std::span<const StepTask> tasks() const { return tasks_; }
  /// The most parts that a search may have.
  [[nodiscard]] uint32_t most_parts() const { return most_parts_; }

 private:
  [[nodiscard]] uint32_t search_parts(const HeadWork& work) const;
  [[nodiscard]] HeadPlan plan(const HeadWork& work) const;

  uint32_t kv_heads_ = 1, group_ = 1, threads_, most_parts_;
  std::vector<HeadPlan> heads_;
  std::vector<StepTask> tasks_;
};

}  // namespace keyhole::runtime

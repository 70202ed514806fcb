// The tasks of RULER (Hsieh et al. 2024, version 1) and the synthetic ones of InfiniteBench (Zhang et al. 2024), to
// the letter of their definitions: templates, counts, token budgets, scores. Random numbers are this project's, so
// samples are others than those of the programs that the benchmarks come with. Behind them come four tasks of this
// project for what needles miss: several turns, near-identical records, order, many recalls. (tools/tasks/ruler_task.h
// has tasks in the manner of RULER, with many questions about one context.)
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "tools/tasks/ruler/qa_data.h"
#include "tools/tasks/ruler/sample.h"
#include "tools/tasks/ruler/score.h"

namespace keyhole::tools::ruler {

/// What a generator is given. All of it that is a view or a pointer lives longer than the generator.
struct TaskSetup {
  uint32_t length =
      0;  ///< tokens of prompt and answer together; some tasks have other counts below 4096
  size_t samples =
      1;  ///< how many are drawn: places and keys of InfiniteBench are spread evenly over them
  uint64_t seed = 0;
  bool chat = false;           ///< whether the prompt will be what a user says
  std::string_view prose;      ///< of tasks that need it
  const QaData* qa = nullptr;  ///< of tasks that need it
  /// The number of tokens of a text by itself.
  std::function<size_t(const std::string&)> count_text;
};

/// What a task needs beside a seed.
enum class Needs : uint8_t { nothing, prose, squad, hotpot_qa };

struct TaskInfo {
  std::string_view name;
  uint32_t answer_tokens;  ///< exactly so many are decoded, unless the model ends its answer before
  Scoring scoring;
  Needs needs;
  bool of_ruler;  ///< false: of InfiniteBench, or of this project
  /// Makes the generator. Throws UsageError for a setup that it can do nothing with.
  std::unique_ptr<Generator> (*make)(const TaskSetup& setup);
  bool one_line = false;  ///< an answer ends with its first line
};

/// All tasks: RULER's 13 in the order of its tables, then three of InfiniteBench, then turns, records, enumerate and
/// mqar.
[[nodiscard]] std::span<const TaskInfo> all_tasks();
/// The task of this name; null where there is none.
[[nodiscard]] const TaskInfo* find_task(std::string_view name);

}  // namespace keyhole::tools::ruler

#include "tools/tasks/ruler/tasks.h"

#include <algorithm>
#include <array>

#include "tools/tasks/ruler/generators.h"

namespace keyhole::tools::ruler {
namespace {

template <Haystack haystack, Kind key, Kind value, size_t keys, size_t values, size_t queries>
std::unique_ptr<Generator> niah(const TaskSetup& setup) {
  return make_niah({haystack, key, value, keys, values, queries}, setup);
}

}  // namespace

std::span<const TaskInfo> all_tasks() {
  using enum Haystack;
  using enum Kind;
  constexpr auto kAll = Scoring::all;
  constexpr auto kNo = Needs::nothing;
  constexpr auto kEssay = Needs::prose;
  static constexpr std::array kTasks{
      TaskInfo{"niah_single_1", 128, kAll, kNo, true, niah<noise, words, numbers, 1, 1, 1>},
      TaskInfo{"niah_single_2", 128, kAll, kEssay, true, niah<essay, words, numbers, 1, 1, 1>},
      TaskInfo{"niah_single_3", 128, kAll, kEssay, true, niah<essay, words, uuids, 1, 1, 1>},
      TaskInfo{"niah_multikey_1", 128, kAll, kEssay, true, niah<essay, words, numbers, 4, 1, 1>},
      TaskInfo{"niah_multikey_2", 128, kAll, kNo, true, niah<needles, words, numbers, 1, 1, 1>},
      TaskInfo{"niah_multikey_3", 128, kAll, kNo, true, niah<needles, uuids, uuids, 1, 1, 1>},
      TaskInfo{"niah_multivalue", 128, kAll, kEssay, true, niah<essay, words, numbers, 1, 4, 1>},
      TaskInfo{"niah_multiquery", 128, kAll, kEssay, true, niah<essay, words, numbers, 1, 1, 4>},
      TaskInfo{"vt", 30, kAll, kNo, true, make_vt},
      TaskInfo{"cwe", 120, kAll, kNo, true, make_cwe},
      TaskInfo{"fwe", 50, kAll, kNo, true, make_fwe},
      TaskInfo{"qa_1", 32, Scoring::part, Needs::squad, true, make_qa},
      TaskInfo{"qa_2", 32, Scoring::part, Needs::hotpot_qa, true, make_qa},
      TaskInfo{"infinitebench_passkey", 6, Scoring::first_number, kNo, false, make_pass_key},
      TaskInfo{"infinitebench_number", 12, Scoring::first_number, kNo, false, make_number_string},
      TaskInfo{"infinitebench_kv", 50, Scoring::word, kNo, false, make_key_value},
      TaskInfo{"turns", 32, Scoring::word, kNo, false, make_turns, true},
      TaskInfo{"records", 320, Scoring::records, kNo, false, make_records},
      TaskInfo{"enumerate", 160, Scoring::ordered, kNo, false, make_enumerate},
      TaskInfo{"mqar", 16, Scoring::first_word, kNo, false, make_mqar, true},
  };
  return kTasks;
}

const TaskInfo* find_task(std::string_view name) {
  const std::span<const TaskInfo> tasks = all_tasks();
  const auto found =
      std::find_if(tasks.begin(), tasks.end(), [&](const TaskInfo& t) { return t.name == name; });
  return found == tasks.end() ? nullptr : &*found;
}

}  // namespace keyhole::tools::ruler

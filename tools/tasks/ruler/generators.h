// The generators of the families of tasks; tasks.cpp has the table of who is made of which.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "tools/tasks/ruler/sample.h"
#include "tools/tasks/ruler/tasks.h"

namespace keyhole::tools::ruler {

enum class Haystack : uint8_t {
  noise,    ///< copies of one line
  needles,  ///< further needles
  essay,    ///< prose
};
enum class Kind : uint8_t { words, numbers, uuids };

/// The needles in a haystack of one task: max(keys, queries) keys with `values` values each, of which `queries` keys
/// are asked for.
struct NiahShape {
  Haystack haystack;
  Kind key, value;
  size_t keys, values, queries;
};
[[nodiscard]] std::unique_ptr<Generator> make_niah(const NiahShape& shape, const TaskSetup& setup);

/// Variable tracking: a chain of five variables among lines of noise, behind a solved example.
[[nodiscard]] std::unique_ptr<Generator> make_vt(const TaskSetup& setup);

/// Common words: ten words ten times as frequent as all others, behind a solved example.
[[nodiscard]] std::unique_ptr<Generator> make_cwe(const TaskSetup& setup);

/// Frequent words: coded words whose counts fall with the square of their rank.
[[nodiscard]] std::unique_ptr<Generator> make_fwe(const TaskSetup& setup);

/// Questions about documents: those that the answer is in, among others. Throws UsageError where setup.qa has fewer
/// questions than samples.
[[nodiscard]] std::unique_ptr<Generator> make_qa(const TaskSetup& setup);

/// InfiniteBench's Retrieve.PassKey: a number in noise, at places spread evenly.
[[nodiscard]] std::unique_ptr<Generator> make_pass_key(const TaskSetup& setup);
/// InfiniteBench's Retrieve.Number: ten digits, half of them repetitions.
[[nodiscard]] std::unique_ptr<Generator> make_number_string(const TaskSetup& setup);
/// InfiniteBench's Retrieve.KV: a JSON object of UUIDs.
[[nodiscard]] std::unique_ptr<Generator> make_key_value(const TaskSetup& setup);

/// Five questions about a list of lockers, then five that refer to these, in one session: the form of SCBench (Li et
/// al. 2024), whose sessions go on behind the right answers, too.
[[nodiscard]] std::unique_ptr<Generator> make_turns(const TaskSetup& setup);

/// All records of one name among records that differ from them in a word of the name and a digit, as JSON.
[[nodiscard]] std::unique_ptr<Generator> make_records(const TaskSetup& setup);

/// All things of one colour, in the order of the text.
[[nodiscard]] std::unique_ptr<Generator> make_enumerate(const TaskSetup& setup);

/// Multi-query associative recall (Arora et al. 2023, arXiv 2312.04927): pairs of words, then keys again.
[[nodiscard]] std::unique_ptr<Generator> make_mqar(const TaskSetup& setup);

}  // namespace keyhole::tools::ruler

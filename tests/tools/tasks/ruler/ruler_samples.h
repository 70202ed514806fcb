// What the tests of RULER's tasks share: generators of tasks by name, and parts of texts.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "tools/tasks/ruler/tasks.h"

namespace keyhole::tools::ruler {

/// Three sentences of 4, 6 and 5 words, over and over.
inline const std::string kThreeSentences =
    "The mill was old. Nobody knew who built it, really.\n  \"Not I,\" said  the miller.\n";

/// Words apart by blanks or line ends.
inline std::vector<std::string> words_in(const std::string& text) {
  std::istringstream in(text);
  std::vector<std::string> out;
  for (std::string word; in >> word;) out.push_back(word);
  return out;
}

/// Lines without their ends; a text that ends with one has an empty last line.
inline std::vector<std::string> lines_in(const std::string& text) {
  std::vector<std::string> out(1);
  for (const char c : text) {
    if (c == '\n') {
      out.emplace_back();
    } else {
      out.back() += c;
    }
  }
  return out;
}

inline size_t times_in(const std::string& text, const std::string& part) {
  size_t n = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++n;
  return n;
}

/// What stands between `before` and the first `behind` after it; the test fails where either is missing.
inline std::string between(const std::string& text, const std::string& before,
                           const std::string& behind) {
  const size_t begin = text.find(before);
  EXPECT_NE(begin, std::string::npos) << before;
  const size_t end = text.find(behind, begin + before.size());
  EXPECT_NE(end, std::string::npos) << behind;
  return text.substr(begin + before.size(), end - begin - before.size());
}

/// A setup whose tokens are words.
inline TaskSetup setup_of(uint32_t length, uint64_t seed = 42) {
  TaskSetup setup;
  setup.length = length;
  setup.seed = seed;
  setup.prose = kThreeSentences;
  setup.count_text = [](const std::string& text) { return words_in(text).size(); };
  return setup;
}

inline std::unique_ptr<Generator> generator_of(const std::string& task, const TaskSetup& setup) {
  const TaskInfo* info = find_task(task);
  EXPECT_NE(info, nullptr) << task;
  return info->make(setup);
}

}  // namespace keyhole::tools::ruler

#include "tools/tasks/kv_task.h"

#include <unordered_map>

#include "tools/tasks/random.h"
#include "tools/terminal/errors.h"

namespace keyhole::tools {
namespace {

constexpr size_t kKeyLetters = 5;
constexpr size_t kValueDigits = 5;
constexpr size_t kLineBytes = kKeyLetters + 1 + kValueDigits + 1;  // a pointer's line has one more
// 5.6 M lines: half of the 26^5 keys, so that drawing an unused one stays quick.
constexpr size_t kMaxContextBytes = size_t{1} << 26;

struct Line {
  std::string key;
  std::string value;
};

/// What follows `?key=`: the value, or the pointer, `=` and what follows that key.
std::string resolve(const std::vector<Line>& lines,
                    const std::unordered_map<std::string, size_t>& line_of, size_t line) {
  std::string answer = lines[line].value;
  while (lines[line].value.front() == '@') {
    line = line_of.at(lines[line].value.substr(1));
    answer += "=" + lines[line].value;
  }
  return answer + "\n";
}

}  // namespace

size_t min_kv_lines(size_t context_bytes) { return context_bytes / (kLineBytes + 1); }

Task make_kv_task(const KvTaskOptions& options) {
  if (options.context_bytes < kLineBytes || options.context_bytes > kMaxContextBytes) {
    throw UsageError("the kv context has " + std::to_string(options.context_bytes) +
                     " bytes; allowed: " + std::to_string(kLineBytes) + " to " +
                     std::to_string(kMaxContextBytes));
  }
  Random random(options.seed);
  Task task;
  task.context.reserve(options.context_bytes);
  std::vector<Line> lines;
  std::unordered_map<std::string, size_t> line_of;
  while (options.context_bytes - task.context.size() >= kLineBytes) {
    Line line{random.letters(kKeyLetters), random.digits(kValueDigits)};
    while (line_of.count(line.key) != 0) line.key = random.letters(kKeyLetters);
    const bool fits_pointer = options.context_bytes - task.context.size() > kLineBytes;
    if (!lines.empty() && random.chance(options.pointer_percent) && fits_pointer) {
      line.value = "@" + lines[random.below(lines.size())].key;
    }
    task.context += line.key + "=" + line.value + "\n";
    line_of.emplace(line.key, lines.size());
    lines.push_back(std::move(line));
  }

  if (options.questions < 1 || options.questions > lines.size()) {
    throw UsageError("questions is " + std::to_string(options.questions) + "; allowed: 1 to " +
                     std::to_string(lines.size()) + ", the lines of a context of " +
                     std::to_string(options.context_bytes) + " bytes");
  }
  // The first part of a Fisher-Yates shuffle draws lines without repetition.
  std::vector<size_t> order(lines.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  for (size_t i = 0; i < options.questions; ++i) {
    std::swap(order[i], order[i + random.below(order.size() - i)]);
    const size_t line = order[i];
    const std::string answer = resolve(lines, line_of, line);
    const std::string value = answer.substr(answer.size() - 1 - kValueDigits, kValueDigits);
    task.questions.push_back(
        {"?" + lines[line].key + "=",
         answer,
         "Every line has the form key=value. What is the value of the key " + lines[line].key +
             "? A value that begins with @ is the name of another key: give that key's value, a "
             "number, instead. Answer with the number alone.",
         {value}});
  }
  return task;
}

}  // namespace keyhole::tools

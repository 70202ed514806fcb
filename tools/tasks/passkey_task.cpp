#include "tools/tasks/passkey_task.h"

#include <algorithm>
#include <unordered_set>

#include "tools/tasks/prose.h"
#include "tools/tasks/random.h"
#include "tools/terminal/errors.h"

namespace keyhole::tools {
namespace {

constexpr size_t kBytesPerPasskey = 256;

}  // namespace

size_t max_passkeys(size_t context_bytes) { return context_bytes / kBytesPerPasskey; }

Task make_passkey_task(const PasskeyTaskOptions& options) {
  const size_t most = max_passkeys(options.context_bytes);
  if (options.questions < 1 || options.questions > most) {
    throw UsageError("questions is " + std::to_string(options.questions) + "; allowed: 1 to " +
                     std::to_string(most) + ", one pass key in " +
                     std::to_string(kBytesPerPasskey) + " bytes of a context of " +
                     std::to_string(options.context_bytes));
  }
  if (options.haystack.empty()) throw UsageError("the haystack is empty; allowed: any text");

  Random random(options.seed);
  Task task;
  std::vector<std::string> sentences;
  std::unordered_set<std::string> names;
  size_t sentence_bytes = 0;
  for (size_t i = 0; i < options.questions; ++i) {
    std::string name;
    do {
      name = random.letters(4 + random.below(4));
    } while (!names.insert(name).second);
    const std::string digits = random.digits(5 + random.below(3));
    sentences.push_back("\n[The pass key of " + name + " is " + digits + ".]\n");
    sentence_bytes += sentences.back().size();
    task.questions.push_back({"\n[Question: what is the pass key of " + name + "? Answer: ",
                              digits + ".]",
                              "What is the pass key of " + name + "? Answer with the number alone.",
                              {digits}});
  }

  const size_t prose_bytes = options.context_bytes - sentence_bytes;
  std::vector<size_t> places(options.questions);
  for (size_t& place : places) place = random.below(prose_bytes + 1);
  std::sort(places.begin(), places.end());

  const Prose prose(options.haystack, random.below(options.haystack.size()));
  task.context = hidden_in_prose(prose, prose_bytes, sentences, places);

  for (size_t i = 0; i + 1 < options.questions; ++i) {
    std::swap(task.questions[i], task.questions[i + random.below(options.questions - i)]);
  }
  return task;
}

}  // namespace keyhole::tools

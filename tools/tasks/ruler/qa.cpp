// Questions about documents: the tasks qa_1 and qa_2 of RULER.
#include <algorithm>
#include <unordered_set>
#include <utility>

#include "tools/tasks/ruler/draws.h"
#include "tools/tasks/ruler/generators.h"
#include "tools/terminal/errors.h"

namespace keyhole::tools::ruler {
namespace {

constexpr std::string_view kQaTemplate =
    "Answer the question based on the given documents. Only give me the answer and do not output "
    "any other words.\n\nThe following are given documents.\n\n{context}\n\nAnswer the question "
    "based on the given documents. Only give me the answer and do not output any other "
    "words.\n\nQuestion: {query}";
constexpr std::string_view kQaPrefix = " Answer:";

constexpr size_t kLeastDocuments = 10;

class Qa : public Generator {
 public:
  explicit Qa(const TaskSetup& setup) : seed_(setup.seed), random_(setup.seed), data_(*setup.qa) {
    if (setup.samples > data_.questions.size()) {
      throw UsageError("--samples is " + std::to_string(setup.samples) + "; allowed: 1 to " +
                       std::to_string(data_.questions.size()) + ", the questions of the data");
    }
  }

  [[nodiscard]] SizeSearch size_search() const override {
    return {.step = kLeastDocuments, .probe = kLeastDocuments, .margin = 3};
  }

  [[nodiscard]] Sample draw(size_t index, size_t units) override {
    const QaQuestion& question = data_.questions[index];
    std::vector<size_t> chosen = choose(question, units);
    // The same order in every sample of a size: RULER shuffles by a generator that begins with the seed each time.
    Random fixed(seed_);
    shuffle(fixed, chosen);
    std::vector<std::string> texts;
    for (size_t i = 0; i < chosen.size(); ++i) {
      texts.push_back("Document " + std::to_string(i + 1) + ":\n" + data_.documents[chosen[i]]);
    }
    return {.prompt =
                filled(kQaTemplate, {{"context", joined(texts, "\n\n")}, {"query", question.text}}),
            .prefix = std::string(kQaPrefix),
            .references = question.answers};
  }

 private:
  /// The question's documents, and others up to `count`: first those of the same article. Where the data has no more,
  /// all of it, repeated.
  [[nodiscard]] std::vector<size_t> choose(const QaQuestion& question, size_t count) {
    const size_t all = data_.documents.size();
    std::vector<size_t> chosen;
    if (count >= all) {
      for (size_t i = 0; i < count; ++i) chosen.push_back(i % all);
      return chosen;
    }
    chosen = question.documents;
    const size_t more = count - std::min(count, chosen.size());
    const std::vector<size_t>& near = question.near_documents;
    if (more <= near.size()) {
      for (const size_t i : distinct(random_, more, near.size())) chosen.push_back(near[i]);
      return chosen;
    }
    chosen.insert(chosen.end(), near.begin(), near.end());
    const std::unordered_set<size_t> taken(chosen.begin(), chosen.end());
    std::vector<size_t> others;
    for (size_t i = 0; i < all; ++i) {
      if (taken.count(i) == 0) others.push_back(i);
    }
    const size_t missing = std::min(more - near.size(), others.size());
    for (const size_t i : distinct(random_, missing, others.size())) chosen.push_back(others[i]);
    return chosen;
  }

  uint64_t seed_;
  Random random_;
  const QaData& data_;
};

}  // namespace

std::unique_ptr<Generator> make_qa(const TaskSetup& setup) { return std::make_unique<Qa>(setup); }

}  // namespace keyhole::tools::ruler

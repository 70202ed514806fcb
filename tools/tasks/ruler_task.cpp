#include "tools/tasks/ruler_task.h"

#include <algorithm>
#include <unordered_set>

#include "tools/tasks/prose.h"
#include "tools/tasks/random.h"
#include "tools/terminal/errors.h"

namespace keyhole::tools {
namespace {

constexpr size_t kBytesPerQuestion = 1024;
// Words of a list that are not frequent, and how often each kind is drawn among 64: a frequent one is 10 times as
// likely.
constexpr size_t kOtherWords = 34;
constexpr size_t kFrequentShare = 10;
constexpr size_t kWordsOfLine = 8;

/// Letters that nothing else has been called yet.
class Names {
 public:
  explicit Names(Random& random) : random_(random) {}
  std::string draw(size_t letters) {
    std::string name;
    do name = random_.letters(letters);
    while (!used_.insert(name).second);
    return name;
  }

 private:
  Random& random_;
  std::unordered_set<std::string> used_;
};

/// Sentences in the order of the text, and the questions about them.
struct Facts {
  std::vector<std::string> sentences;
  std::vector<Question> questions;
};

std::vector<size_t> random_order(Random& random, size_t count) {
  std::vector<size_t> order(count);
  for (size_t i = 0; i < count; ++i) order[i] = i;
  for (size_t i = 0; i + 1 < count; ++i) std::swap(order[i], order[i + random.below(count - i)]);
  return order;
}

Facts needles(Random& random, size_t questions) {
  Facts facts;
  Names names(random);
  for (size_t i = 0; i < questions; ++i) {
    const std::string name = names.draw(6);
    Question question;
    for (size_t n = 0; n < kRulerNeedles; ++n) {
      question.values.push_back(random.digits(7));
      facts.sentences.push_back("\n[One of the magic numbers of " + name + " is " +
                                question.values.back() + ".]\n");
    }
    const std::string count = std::to_string(kRulerNeedles);
    question.prompt = "\n[Question: what are all " + count + " magic numbers of " + name +
                      "? Answer: the magic numbers of " + name + " are";
    question.spoken =
        "What are all " + count + " magic numbers of " + name + "? Answer with the numbers alone.";
    facts.questions.push_back(std::move(question));
  }
  const std::vector<size_t> order = random_order(random, facts.sentences.size());
  std::vector<std::string> mixed;
  for (const size_t i : order) mixed.push_back(facts.sentences[i]);
  facts.sentences = std::move(mixed);
  return facts;
}

Facts variables(Random& random, size_t questions) {
  Facts facts;
  Names names(random);
  std::vector<std::vector<std::string>> chains;
  std::unordered_set<std::string> numbers;
  for (size_t i = 0; i < questions; ++i) {
    std::string number;
    do number = random.digits(5);
    while (!numbers.insert(number).second);
    Question question;
    std::vector<std::string>& lines = chains.emplace_back();
    for (size_t n = 0; n < kRulerChain; ++n) {
      std::string name = names.draw(5);
      for (char& c : name) c = static_cast<char>(c - 'a' + 'A');
      const std::string value = n == 0 ? number : "VAR " + question.values.back();
      lines.push_back("\nVAR " + name + " = " + value + "\n");
      question.values.push_back(name);
    }
    question.prompt = "\n[Question: which variables have the value " + number + "? Answer: the " +
                      std::to_string(kRulerChain) + " variables that have the value " + number +
                      " are";
    question.spoken = "Find all variables that have the value " + number +
                      ", assigned directly or from another variable. There are " +
                      std::to_string(kRulerChain) + ". Answer with their names alone.";
    facts.questions.push_back(std::move(question));
  }
  // Chains in each other, each in its own order.
  std::vector<size_t> turns;
  for (size_t i = 0; i < questions * kRulerChain; ++i) turns.push_back(i % questions);
  const std::vector<size_t> order = random_order(random, turns.size());
  std::vector<size_t> next(questions);
  for (const size_t i : order) facts.sentences.push_back(chains[turns[i]][next[turns[i]]++]);
  return facts;
}

struct WordList {
  std::string name;
  std::vector<std::string> words;  // the frequent ones first
  std::vector<size_t> counts;
};

/// The next word: frequent ones often, others so seldom that none ever has more than half of the rarest frequent one's
/// count.
size_t draw_word(Random& random, WordList& list) {
  constexpr size_t kShares = kRulerWords * kFrequentShare + kOtherWords;
  const size_t share = random.below(kShares);
  size_t word = share < kRulerWords * kFrequentShare
                    ? share / kFrequentShare
                    : kRulerWords + share - kRulerWords * kFrequentShare;
  const auto rarest = std::min_element(list.counts.begin(), list.counts.begin() + kRulerWords);
  if (word >= kRulerWords && 2 * (list.counts[word] + 1) > *rarest) {
    word = static_cast<size_t>(rarest - list.counts.begin());
  }
  ++list.counts[word];
  return word;
}

Task words(const RulerTaskOptions& options, Random& random) {
  Task task;
  Names names(random);
  std::vector<WordList> lists;
  for (size_t i = 0; i < options.questions; ++i) {
    WordList list{names.draw(6), {}, std::vector<size_t>(kRulerWords + kOtherWords)};
    while (list.words.size() < list.counts.size()) list.words.push_back(names.draw(5));
    lists.push_back(std::move(list));
  }
  while (true) {
    WordList& list = lists[random.below(lists.size())];
    std::vector<size_t> before = list.counts;
    std::string line = list.name + ":";
    for (size_t n = 0; n < kWordsOfLine; ++n) line += " " + list.words[draw_word(random, list)];
    line += "\n";
    if (task.context.size() + line.size() > options.context_bytes) {
      list.counts = std::move(before);
      break;
    }
    task.context += line;
  }
  for (const WordList& list : lists) {
    Question question;
    question.values.assign(list.words.begin(), list.words.begin() + kRulerWords);
    const std::string count = std::to_string(kRulerWords);
    question.prompt = "\n[Question: which " + count + " words are the most frequent of " +
                      list.name + "? Answer: the " + count + " most frequent words of " +
                      list.name + " are";
    question.spoken = "Every line is a part of a list, whose name it begins with. Which " + count +
                      " words occur most often in the list " + list.name +
                      "? Answer with the words alone.";
    task.questions.push_back(std::move(question));
  }
  return task;
}

}  // namespace

size_t max_ruler_questions(size_t context_bytes) { return context_bytes / kBytesPerQuestion; }

Task make_ruler_task(const RulerTaskOptions& options) {
  const size_t most = max_ruler_questions(options.context_bytes);
  if (options.questions < 1 || options.questions > most) {
    throw UsageError("questions is " + std::to_string(options.questions) + "; allowed: 1 to " +
                     std::to_string(most) + ", one in " + std::to_string(kBytesPerQuestion) +
                     " bytes of a context of " + std::to_string(options.context_bytes));
  }
  Random random(options.seed);
  if (options.kind == RulerKind::words) return words(options, random);
  if (options.haystack.empty()) throw UsageError("the haystack is empty; allowed: any text");

  Facts facts = options.kind == RulerKind::needles ? needles(random, options.questions)
                                                   : variables(random, options.questions);
  size_t prose_bytes = options.context_bytes;
  for (const std::string& sentence : facts.sentences) prose_bytes -= sentence.size();
  std::vector<size_t> places(facts.sentences.size());
  for (size_t& place : places) place = random.below(prose_bytes + 1);
  std::sort(places.begin(), places.end());
  Task task;
  task.questions = std::move(facts.questions);
  task.context = hidden_in_prose(Prose(options.haystack, random.below(options.haystack.size())),
                                 prose_bytes, facts.sentences, places);
  return task;
}

}  // namespace keyhole::tools

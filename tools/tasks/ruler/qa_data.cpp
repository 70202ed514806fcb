#include "tools/tasks/ruler/qa_data.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "runtime/files/json.h"

namespace keyhole::tools::ruler {
namespace {

using nlohmann::json;

/// The documents' numbers by their text, once all are known.
class DocumentNumbers {
 public:
  void add(std::string text) { documents_.push_back(std::move(text)); }
  void sort() {
    std::sort(documents_.begin(), documents_.end());
    documents_.erase(std::unique(documents_.begin(), documents_.end()), documents_.end());
  }
  [[nodiscard]] size_t of(const std::string& text) const {
    return static_cast<size_t>(std::lower_bound(documents_.begin(), documents_.end(), text) -
                               documents_.begin());
  }
  [[nodiscard]] std::vector<std::string> take() { return std::move(documents_); }

 private:
  std::vector<std::string> documents_;
};

QaData squad_of(const json& file) {
  QaData data;
  data.is_squad = true;
  DocumentNumbers numbers;
  for (const json& article : file.at("data")) {
    for (const json& paragraph : article.at("paragraphs")) numbers.add(paragraph.at("context"));
  }
  numbers.sort();
  for (const json& article : file.at("data")) {
    std::vector<size_t> of_article;
    for (const json& paragraph : article.at("paragraphs")) {
      of_article.push_back(numbers.of(paragraph.at("context")));
    }
    for (const json& paragraph : article.at("paragraphs")) {
      const size_t own = numbers.of(paragraph.at("context"));
      for (const json& asked : paragraph.at("qas")) {
        if (asked.value("is_impossible", false)) continue;
        QaQuestion question{asked.at("question"), {}, {own}, {}};
        for (const json& answer : asked.at("answers"))
          question.answers.push_back(answer.at("text"));
        std::copy_if(of_article.begin(), of_article.end(),
                     std::back_inserter(question.near_documents),
                     [own](size_t other) { return other != own; });
        if (!question.answers.empty()) data.questions.push_back(std::move(question));
      }
    }
  }
  data.documents = numbers.take();
  return data;
}

/// A paragraph of HotpotQA as a document: its title, and its sentences one behind the other.
std::string paragraph_text(const json& paragraph) {
  std::string text = paragraph.at(0).get<std::string>() + "\n";
  for (const json& sentence : paragraph.at(1)) text += sentence.get<std::string>();
  return text;
}

QaData hotpot_of(const json& file) {
  QaData data;
  DocumentNumbers numbers;
  for (const json& asked : file) {
    for (const json& paragraph : asked.at("context")) numbers.add(paragraph_text(paragraph));
  }
  numbers.sort();
  for (const json& asked : file) {
    QaQuestion question{asked.at("question"), {asked.at("answer")}, {}, {}};
    for (const json& paragraph : asked.at("context")) {
      question.documents.push_back(numbers.of(paragraph_text(paragraph)));
    }
    data.questions.push_back(std::move(question));
  }
  data.documents = numbers.take();
  return data;
}

}  // namespace

QaData parse_qa(const std::string& text, const std::string& name) {
  QaData data;
  try {
    const json file = json::parse(text);
    data = file.is_array() ? hotpot_of(file) : squad_of(file);
  } catch (const json::exception& error) {
    throw std::runtime_error(name + " is no file of SQuAD or HotpotQA: " + error.what());
  }
  if (data.questions.empty()) {
    throw std::runtime_error(name + " has no question with an answer");
  }
  return data;
}

}  // namespace keyhole::tools::ruler

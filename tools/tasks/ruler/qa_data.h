// Questions about documents, from the files of SQuAD and HotpotQA.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace keyhole::tools::ruler {

struct QaQuestion {
  std::string text;
  std::vector<std::string> answers;  ///< any of them is right
  std::vector<size_t>
      documents;  ///< those that the answer is in, or that were given with the question
  std::vector<size_t> near_documents;  ///< of SQuAD: the other paragraphs of the same article
};

struct QaData {
  std::vector<std::string> documents;  ///< ascending, each once
  std::vector<QaQuestion> questions;   ///< in the file's order
  bool is_squad = false;               ///< otherwise of HotpotQA
};

/// Parses a file of SQuAD (an object with "data": articles of "paragraphs" with "context" and "qas"; questions that are
/// "is_impossible" are left out) or of HotpotQA (a list of objects with "question", "answer" and "context": pairs of a
/// title and sentences). Throws std::runtime_error that begins with `name`, the file's, and says what was expected.
[[nodiscard]] QaData parse_qa(const std::string& text, const std::string& name);

}  // namespace keyhole::tools::ruler

// Retrieval tasks: a context that holds facts, and questions that only those facts answer.
#pragma once

#include <string>
#include <vector>

namespace keyhole::tools {

/// A question, asked by appending `prompt` to the context. It is answered by continuing with exactly `answer`, which
/// ends with a character that occurs nowhere else in it, or with a free text where `answer` is empty.
struct Question {
  std::string prompt;
  std::string answer;
  std::string spoken = {};               ///< the question as one asks a person or an instruct model
  std::vector<std::string> values = {};  ///< what any right answer to it contains, all of it
};

struct Task {
  std::string context;
  std::vector<Question> questions;
};

}  // namespace keyhole::tools

// Retrieval tasks: a context that holds facts, and questions that only those facts answer.
#pragma once

#include <string>
#include <vector>

namespace keyhole::tools {

/// Asked by appending `prompt` to the context; answered by continuing with exactly `answer`, which ends
/// with a character that occurs nowhere else in it.
struct Question {
  std::string prompt;
  std::string answer;
  std::string spoken = {};  ///< the question as one asks a person or an instruct model
  std::string value = {};   ///< what any right answer to it contains
};

struct Task {
  std::string context;
  std::vector<Question> questions;
};

}  // namespace keyhole::tools

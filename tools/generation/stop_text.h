// Texts that end an answer, found in text that comes in pieces.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace keyhole::tools {

class StopText {
 public:
  /// Empty texts are left out.
  explicit StopText(std::vector<std::string> stops);

  /// Takes the next piece of text and returns what can be shown: all before the first stop text, which itself is never
  /// shown, without an end that more text may make the beginning of one.
  [[nodiscard]] std::string push(std::string_view text);
  /// A stop text has come: nothing more will be shown.
  [[nodiscard]] bool found() const { return found_; }
  /// What was held back, as no more text comes.
  [[nodiscard]] std::string finish();

 private:
  std::vector<std::string> stops_;
  std::string held_;
  bool found_ = false;
};

}  // namespace keyhole::tools

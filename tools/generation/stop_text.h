// Texts that end an answer, found in text that comes in pieces.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace keyhole::tools {

class StopText {
 public:
  /// Searches for these texts; empty ones are left out.
  explicit StopText(std::vector<std::string> stops);

  /// Takes the next piece of text and returns what can be shown: the text before the first stop text, which itself is
  /// never shown, without an end that could become a stop text with more text.
  [[nodiscard]] std::string push(std::string_view text);
  /// Whether a stop text has come: nothing more will be shown.
  [[nodiscard]] bool found() const { return found_; }
  /// Returns the text that was held back, when no more comes.
  [[nodiscard]] std::string finish();

 private:
  std::vector<std::string> stops_;
  std::string held_;
  bool found_ = false;
};

}  // namespace keyhole::tools

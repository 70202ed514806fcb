// A text without end, read from a given place on, in which facts are hidden.
#pragma once

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

namespace keyhole::tools {

class Prose {
 public:
  /// Reads `text`, which is not empty and lives longer, from byte `start` on.
  Prose(std::string_view text, size_t start) : text_(text), at_(start) {}

  void append(size_t bytes, std::string& out) {
    while (bytes > 0) {
      const size_t piece = std::min(bytes, text_.size() - at_);
      out.append(text_.substr(at_, piece));
      bytes -= piece;
      at_ = (at_ + piece) % text_.size();
    }
  }

 private:
  std::string_view text_;
  size_t at_;
};

/// Returns `bytes` of prose into which each sentence is put behind as many bytes as its place says; places ascend.
[[nodiscard]] inline std::string hidden_in_prose(Prose prose, size_t bytes,
                                                 const std::vector<std::string>& sentences,
                                                 const std::vector<size_t>& places) {
  std::string out;
  size_t done = 0;
  for (size_t i = 0; i < places.size(); ++i) {
    prose.append(places[i] - done, out);
    out += sentences[i];
    done = places[i];
  }
  prose.append(bytes - done, out);
  return out;
}

}  // namespace keyhole::tools

// Reads lines of a terminal or a pipe, with Ctrl-C while it waits for them.
#pragma once

#include <string>

namespace keyhole::tools {

class LineReader {
 public:
  /// Borrows the descriptor, which nobody else reads from.
  explicit LineReader(int descriptor) : descriptor_(descriptor) {}

  enum class Event {
    line,
    end,          ///< Ctrl-D, or the end of the pipe
    interrupted,  ///< what had been typed is gone; see forget_interrupt()
  };
  /// Waits for the next line and puts it, without its line end, in `line`. The text behind the last line end of a
  /// pipe is a line as well. Throws std::runtime_error where the descriptor cannot be read.
  [[nodiscard]] Event read(std::string& line);

 private:
  const int descriptor_;
  std::string pending_;
  bool ended_ = false;
};

}  // namespace keyhole::tools

// Which tokens a ring of a layer with a sliding window holds.
#pragma once

#include <cstddef>
#include <cstdint>

namespace keyhole::tools {

/// Of a window of W tokens the last W + kSlack, so that the sequence can be taken back by as many. Token i attends to j with
/// i - j < W.
struct WindowSpan {
  /// Tokens behind the window that are kept for truncate().
  static constexpr uint32_t kSlack = 4096;

  size_t window;
  size_t slots;       ///< token t lies in slot t % slots
  size_t count = 0;   ///< tokens so far
  size_t oldest = 0;  ///< the first that is still there

  /// Slots of a ring for a window; max_tokens: the longest sequence; 0: not known.
  [[nodiscard]] static size_t slots_of(size_t window, uint32_t max_tokens);
  /// Throws std::runtime_error for a sequence of more than max_tokens, where these are known.
  static void check_room(size_t tokens, uint32_t max_tokens);

  void add(size_t tokens);
  /// Throws std::runtime_error where a window would begin before what is there; to 0 it can always go.
  void check_truncation(size_t tokens) const;
  void truncate(size_t tokens);
};

}  // namespace keyhole::tools

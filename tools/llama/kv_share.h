// Which keys and values of a prompt a rank stores, and so which its host is to be brought.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace keyhole::tools {

/// Ranks that share KV heads have some of them, of all tokens; those that share a text have all heads of every so many
/// blocks of tokens. A process alone has everything.
struct KvShare {
  uint32_t first_head = 0;
  uint32_t heads = 0;  ///< 0: all
  size_t block =
      0;  ///< tokens that stay together on a rank, a token t on rank t / block mod `ranks`; 0: all are here
  uint32_t rank = 0, ranks = 1;

  [[nodiscard]] uint32_t heads_of(uint32_t all) const { return heads == 0 ? all : heads; }
  /// Whether it has a token of the text.
  [[nodiscard]] bool has(size_t token) const { return block == 0 || token / block % ranks == rank; }
  /// Calls f(token, n) for each stretch of n tokens that it has, as long as can be, among `count` from `first` on.
  template <class F>
  void for_each_run(size_t first, size_t count, const F& f) const {
    if (block == 0) return f(first, count);
    for (size_t token = first; token < first + count;) {
      const size_t n = std::min(first + count - token, block - token % block);
      if (has(token)) f(token, n);
      token += n;
    }
  }
};

}  // namespace keyhole::tools

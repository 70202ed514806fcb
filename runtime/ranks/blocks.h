// Which token of a text is whose, where it is spread over ranks by blocks in turn.
#pragma once

#include <algorithm>
#include <cstdint>

namespace keyhole::runtime {

struct TextBlocks {
  uint32_t block = 1;  ///< tokens
  uint32_t ranks = 1;

  [[nodiscard]] uint32_t owner(uint32_t token) const { return token / block % ranks; }
  /// Of the first `tokens` of the text those of `rank`.
  [[nodiscard]] uint32_t share(uint32_t rank, uint32_t tokens) const {
    const uint64_t round = uint64_t{block} * ranks, begin = uint64_t{block} * rank;
    const uint64_t left = tokens % round;
    const uint64_t part = left > begin ? std::min<uint64_t>(left - begin, block) : 0;
    return static_cast<uint32_t>(tokens / round * block + part);
  }
  /// Tokens from `token` on that its block still has, at most `n`.
  [[nodiscard]] uint32_t run(uint32_t token, uint32_t n) const {
    return std::min(n, block - token % block);
  }
};

}  // namespace keyhole::runtime

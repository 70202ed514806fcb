// Rows cut into blocks of consecutive ones, of which the best are taken.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

namespace keyhole::tools {

struct BlocksOfRows {
  size_t rows = 0;
  size_t size = 1;  ///< of a block; the last one may be shorter

  [[nodiscard]] size_t count() const { return (rows + size - 1) / size; }

  /// Sets `out` to the rows of the blocks of the largest scores `[count]`: as many whole blocks as hold `budget`
  /// rows, at least one. `order` is working memory.
  void best(const std::vector<float>& scores, size_t budget, std::vector<uint32_t>& order,
            std::vector<uint32_t>& out) const {
    const size_t wanted = std::clamp<size_t>(budget / size, 1, count());
    const size_t taken = budget >= rows ? count() : wanted;
    order.resize(count());
    std::iota(order.begin(), order.end(), 0U);
    if (taken < count()) {
      // Of equal scores the earlier block is taken, so that the choice is the same everywhere.
      std::nth_element(order.begin(), order.begin() + static_cast<ptrdiff_t>(taken), order.end(),
                       [&](uint32_t a, uint32_t b) {
                         return scores[a] != scores[b] ? scores[a] > scores[b] : a < b;
                       });
    }
    out.clear();
    for (size_t i = 0; i < taken; ++i) {
      const size_t end = std::min(rows, (order[i] + size_t{1}) * size);
      for (size_t row = order[i] * size; row < end; ++row) {
        out.push_back(static_cast<uint32_t>(row));
      }
    }
  }
};

}  // namespace keyhole::tools

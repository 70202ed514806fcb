// Memory of attention by lists of blocks: how many KV heads lie on the device together, and that nothing overlaps.
// Needs no GPU.
#include "gpu/listed_layout.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "gpu/listed.h"

namespace keyhole::gpu {
namespace {

TEST(ListedLayout, AsManyHeadsAsFit) {
  const BlockedShape shape{32, 8, 128, DType::f16};
  // K and V of a head: 512 bytes a row.
  EXPECT_EQ(ListedLayout(shape, 512, 131072, false).heads, 1U);
  EXPECT_EQ(ListedLayout(shape, 512, 65536, false).heads, 2U);
  EXPECT_EQ(ListedLayout(shape, 512, 30000, false).heads, 4U);
  EXPECT_EQ(ListedLayout(shape, 512, 512, false).heads, 8U);
  EXPECT_EQ(ListedLayout(shape, 512, 4000000, false).heads, 1U);
  // A divisor of all.
  EXPECT_EQ(ListedLayout({6, 6, 128, DType::bf16}, 1, 65536 / 2, false).heads, 3U);
  EXPECT_EQ(ListedLayout({7, 7, 128, DType::bf16}, 1, 65536 / 2, false).heads, 1U);
}

TEST(ListedLayout, PartsLieBesideOneAnother) {
  for (const bool in_int8 : {false, true}) {
    for (const bool has_low : {false, true}) {
      const BlockedShape shape{12, 4, 80, DType::f16, in_int8};
      constexpr uint32_t kNew = 300, kRows = 5000;
      const ListedLayout l(shape, kNew, kRows, has_low, size_t{4} << 20U);
      EXPECT_EQ(l.heads, 2U);
      const size_t queries = size_t{kNew} * 6, row = 160;
      std::vector<std::pair<size_t, size_t>> parts = {
          {l.q, queries * row}, {l.lse, queries * 4}, {l.bad, 4}};
      if (has_low) parts.emplace_back(l.q_low, queries * row);
      for (uint32_t lot = 0; lot < 2; ++lot) {
        for (uint32_t which = 0; which < 2; ++which) {
          for (uint32_t head = 0; head < l.heads; ++head)
            parts.emplace_back(l.head_at(lot, which, head), kRows * row);
        }
      }
      if (in_int8) {
        parts.emplace_back(l.raw, size_t{l.piece_rows} * 80);
        const size_t blocks = kRows / kScaleRows + kMostListedPlaces;
        parts.emplace_back(l.scales, blocks * 4 * 2 * 80 * sizeof(uint16_t));
      }
      std::sort(parts.begin(), parts.end());
      for (size_t i = 0; i < parts.size(); ++i) {
        EXPECT_EQ(parts[i].first % 256, 0U);
        EXPECT_LE(parts[i].first + parts[i].second,
                  i + 1 < parts.size() ? parts[i + 1].first : l.bytes);
      }
      EXPECT_EQ(l.piece_rows % kScaleRows, 0U);
      EXPECT_LE(l.piece_rows * row, l.piece_bytes);
    }
  }
}

}  // namespace
}  // namespace keyhole::gpu

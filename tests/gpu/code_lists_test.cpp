// The sizes that lists of codes on the device have.
#include "gpu/code_lists.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <string>

namespace keyhole::gpu {
namespace {

TEST(CodeLists, HaveRoomForClustersOfAnySize) {
  for (const uint32_t list_rows : {16U, 64U, 256U}) {
    for (const uint32_t blocks : {1U, 128U, 4096U}) {
      const ListSizes sizes(blocks, list_rows);
      const uint32_t rows = blocks * kCodeBlock;
      // Clusters of more than a block's rows are divided, so that there is one list more for every 256 rows at most.
      EXPECT_GE(sizes.lists, rows / list_rows + rows / kCodeBlock);
      EXPECT_EQ(sizes.lists % 16, 0U) << "tiles of means of a KV head are its own";
      // As many pairs as there can be are places that a step may read.
      EXPECT_GE(sizes.groups, rows / 32 + sizes.lists);
      EXPECT_GE(sizes.pairs, rows / 32 + rows / 96);
      // A list's last pair is half full on average.
      EXPECT_GE(sizes.pairs, rows / 32 + rows / list_rows / 2);
    }
  }
}

TEST(CodeLists, HaveRoomForEveryStretchesOwn) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 rng(seed);
  for (uint32_t list_rows = kFewestListRows; list_rows <= kCodeBlock; ++list_rows) {
    for (uint32_t round = 0; round < 20; ++round) {
      const uint32_t most = round % 2 == 0 ? 4 : kListStretch / kCodeBlock;
      uint32_t blocks = 0, lists = 0, pairs = 0;
      for (uint32_t i = 0; i < 30; ++i) {
        const uint32_t of_stretch = 1 + rng() % most, rows = of_stretch * kCodeBlock;
        const ListStretch stretch(rows, list_rows);
        // Clusters divided, and even lists.
        EXPECT_GE(stretch.lists, stretch.clusters + of_stretch);
        EXPECT_GE(stretch.lists, (rows + stretch.even_rows - 1) / stretch.even_rows);
        EXPECT_GE(stretch.pairs, rows / kPairRows);
        EXPECT_EQ(stretch.even_rows % kPairRows, 0U);
        blocks += of_stretch, lists += stretch.lists, pairs += stretch.pairs;
      }
      const ListSizes sizes(blocks, list_rows);
      ASSERT_LE(lists, sizes.lists) << list_rows;
      ASSERT_LE(pairs, sizes.pairs) << list_rows;
    }
  }
}

}  // namespace
}  // namespace keyhole::gpu

// How lists of codes are packed for the device, tile by tile, and the sizes that they have.
#include "gpu/code_lists.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

namespace keyhole::gpu {
namespace {

/// Lists of these many rows as the host has them, with random codes.
struct HostLists {
  HostLists(const CodeShape& shape, const std::vector<uint32_t>& rows, std::mt19937& rng) {
    uint32_t end = 0;
    for (const uint32_t n : rows) {
      end += n;
      ends.push_back(end);
      at.push_back(codes.size());
      const size_t tiles = (n + kCodeTile - 1) / kCodeTile;
      const size_t bytes =
          tiles *
          (size_t{kCodeLanes} * 4 * (shape.key_words() + shape.value_words()) + kCodeTile * 4);
      for (size_t i = 0; i < bytes; ++i) codes.push_back(static_cast<std::byte>(rng()));
      spreads.push_back(0.5F + static_cast<float>(end));
      noises.push_back(1.5F + static_cast<float>(end));
      widest.push_back(2.5F + static_cast<float>(end));
    }
    for (uint32_t i = 0; i < end; ++i) ids.push_back(rng() % 100000);
  }
  [[nodiscard]] HeadLists view() const {
    return {.lists = static_cast<uint32_t>(ends.size()),
            .ids = ids.data(),
            .ends = ends.data(),
            .at = at.data(),
            .codes = codes.data(),
            .spreads = spreads.data(),
            .noises = noises.data(),
            .widest = widest.data()};
  }
  std::vector<uint32_t> ends, ids;
  std::vector<size_t> at;
  std::vector<std::byte> codes;
  std::vector<float> spreads, noises, widest;
};

TEST(CodeLists, PackEveryTileOfEveryList) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 rng(seed);
  const std::vector<uint32_t> rows{1, 16, 17, 32, 33, 256, 48, 64, 3};
  for (const CodeShape& shape : {CodeShape{64, 2, 2}, CodeShape{80, 4, 4}, CodeShape{256, 4, 4}}) {
    const HostLists host(shape, rows, rng);
    PackedLists packed;
    packed.ids.assign(5, 7);  // of another call
    pack_lists(shape, host.view(), 100, packed);
    const size_t key_tile = size_t{kCodeLanes} * 4 * shape.key_words();
    const size_t value_tile = size_t{kCodeLanes} * 4 * shape.value_words();
    const size_t factor_tile = size_t{kCodeTile} * 4;
    const size_t pair_bytes = list_pair_bytes(shape);
    EXPECT_EQ(pair_bytes, 2 * (key_tile + value_tile + factor_tile));
    uint32_t pair = 0, begin = 0;
    ASSERT_EQ(packed.places.size(), rows.size());
    ASSERT_EQ(packed.figures.size(), rows.size());
    for (size_t l = 0; l < rows.size(); ++l) {
      SCOPED_TRACE("list of " + std::to_string(rows[l]));
      EXPECT_EQ(packed.places[l].first_pair, 100 + pair);
      EXPECT_EQ(packed.places[l].rows, rows[l]);
      EXPECT_EQ(packed.figures[l].spread, host.spreads[l]);
      EXPECT_EQ(packed.figures[l].noise, host.noises[l]);
      EXPECT_EQ(packed.figures[l].widest, host.widest[l]);
      EXPECT_FLOAT_EQ(packed.figures[l].log_rows, std::log(static_cast<float>(rows[l])));
      const uint32_t tiles = (rows[l] + 15) / 16, pairs = (rows[l] + 31) / 32;
      const std::byte* const from = host.codes.data() + host.at[l];
      for (uint32_t t = 0; t < 2 * pairs; ++t) {
        const std::byte* to = packed.pairs.data() + (pair + t / 2) * pair_bytes;
        const auto equal = [&](const std::byte* seen, size_t part, size_t bytes) {
          for (size_t i = 0; i < bytes; ++i) {
            const std::byte right = t < tiles ? from[part + t * bytes + i] : std::byte{0};
            if (seen[i] != right) return false;
          }
          return true;
        };
        EXPECT_TRUE(equal(to + t % 2 * key_tile, 0, key_tile)) << t;
        EXPECT_TRUE(equal(to + 2 * key_tile + t % 2 * value_tile, tiles * key_tile, value_tile))
            << t;
        EXPECT_TRUE(equal(to + 2 * (key_tile + value_tile) + t % 2 * factor_tile,
                          tiles * (key_tile + value_tile), factor_tile))
            << t;
      }
      for (uint32_t i = 0; i < 32 * pairs; ++i) {
        EXPECT_EQ(packed.ids[32 * pair + i], i < rows[l] ? host.ids[begin + i] : 0U);
      }
      pair += pairs;
      begin += rows[l];
    }
    EXPECT_EQ(pairs_of_lists(host.view()), pair);
    EXPECT_EQ(packed.pairs.size(), pair * pair_bytes);
    EXPECT_EQ(packed.ids.size(), size_t{32} * pair);
  }
}

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

}  // namespace
}  // namespace keyhole::gpu

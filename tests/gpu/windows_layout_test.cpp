// Rings of sliding layers: which slots a step attends, and where what lies. Needs no GPU.
#include "gpu/windows_layout.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <utility>
#include <vector>

namespace keyhole::gpu {
namespace {

TEST(WindowRing, AttendsTheNewestTokensInTheirSlots) {
  for (const uint32_t slots : {1U, 2U, 5U, 12U}) {
    for (uint32_t window = 1; window <= slots; ++window) {
      const RingShape ring{0, slots, slots - 1};
      RingState state;
      for (uint32_t token = 0; token < 40; ++token) {
        state = after_step(ring, state, true);
        const RingState seen = attended(ring, state, window);
        const uint32_t count = std::min(window, token + 1);
        ASSERT_EQ(seen.tokens(), count) << slots << " slots, token " << token;
        for (uint32_t i = 0; i < count; ++i) {
          ASSERT_EQ(token_slot(ring, seen, i), (token + 1 - count + i) % slots)
              << slots << " slots, window " << window << ", token " << token;
        }
        EXPECT_EQ(seen.sequence, state.sequence);
        // Drafts go, and others come in their slots.
        if (token % 7 == 6 && slots > window + 1) {
          state = without_newest(state, 1);
          state = after_step(ring, state, true);
        }
      }
      EXPECT_EQ(attended(ring, state, 0).tokens(), std::min(slots, 40U)) << "0: all";
    }
  }
}

// Compares with the newest `window` of all tokens that a draft sees, counted one by one.
TEST(SeenDrafts, ReachBackToWhatTheWindowHasRoomFor) {
  std::mt19937_64 random(5);
  for (int i = 0; i < 2000; ++i) {
    const auto drafts = static_cast<uint32_t>(1 + random() % kMostDrafts);
    const auto window = static_cast<uint32_t>(1 + random() % 80);
    const uint64_t own = uint64_t{1} << (drafts - 1);
    const uint64_t others = i % 3 == 0 ? random() & random() & random() : random();
    const SeenDrafts seen{drafts, (others & (own - 1)) | own};
    uint32_t left = window, reach = 0;
    uint64_t within = 0;
    for (uint32_t j = drafts; j-- > 0;) {
      if ((seen.sees >> j & 1) == 0 || left == 0) continue;
      within |= uint64_t{1} << j;
      --left;
    }
    reach = drafts + left;  // those before the drafts are seen
    ASSERT_EQ(seen.seen_within(window), within) << drafts << " drafts, window " << window;
    ASSERT_EQ(seen.reach(window), reach) << drafts << " drafts, window " << window;
  }
  EXPECT_EQ(SeenDrafts{}.reach(17), 17U) << "no drafts: the window";
}

TEST(WindowsLayout, NothingOverlaps) {
  const WindowsShape shape{
      8, 2, 80, DType::f16, {{0, 30, 40, {}}, {1, 8, 9, {}}, {3, 30, 40, {}}, {4, 5, 40, {}}}, {}};
  const WindowsLayout layout(shape);
  std::vector<std::pair<size_t, size_t>> taken = {{0, layout.scratch.bytes()}};
  for (uint32_t layer = 0; layer < 4; ++layer) {
    const size_t bytes = size_t{2} * 2 * 80 * 2 * shape.layers[layer].slots;
    taken.emplace_back(layout.kv(layer), layout.kv(layer) + bytes);
    EXPECT_EQ(layout.kv(layer) % 16, 0U);
    for (uint32_t h = 0; h < 2; ++h) {
      const size_t at = layout.end_state(layer, h);
      taken.emplace_back(at, at + 4 * (80 + 1) * sizeof(float));
      EXPECT_EQ(at % 16, 0U);
    }
  }
  std::sort(taken.begin(), taken.end());
  for (size_t i = 1; i < taken.size(); ++i) EXPECT_LE(taken[i - 1].second, taken[i].first) << i;
  EXPECT_LE(taken.back().second, layout.bytes);
  EXPECT_EQ(windows_bytes(shape), layout.bytes);
  // Layers with rings of one size lie side by side.
  ASSERT_EQ(layout.groups.size(), 2U);
  EXPECT_EQ(layout.groups[0].count, 3U);
  EXPECT_EQ(layout.kv(2) - layout.kv(0), layout.groups[0].layer_bytes);
  EXPECT_EQ(layout.kv(3) - layout.kv(2), layout.groups[0].layer_bytes);
  EXPECT_EQ(layout.places, (std::vector<uint32_t>{0, 3, 1, 2}));
}

TEST(WindowsLayout, RefusesASizeThatWouldWrap) {
  const WindowsShape shape{4096,
                           4096,
                           256,
                           DType::f32,
                           std::vector<WindowsShape::Layer>(1024, {0, 1U << 29U, 1U << 30U, {}}),
                           {}};
  EXPECT_THROW((void)windows_bytes(shape), Error);
}

}  // namespace
}  // namespace keyhole::gpu

// How steps are divided into launches, by its definition over random kinds.
#include "gpu/step_group.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <string>
#include <vector>

#include "tests/sanitized.h"

namespace keyhole::gpu {
namespace {

using Launches = std::vector<std::vector<uint32_t>>;

template <uint32_t kMost>
Launches divided(const std::vector<uint32_t>& kinds) {
  Launches launches;
  divide_steps<kMost>(kinds, [&](std::span<const uint32_t> numbers) {
    launches.emplace_back(numbers.begin(), numbers.end());
  });
  return launches;
}

TEST(DivideSteps, KeepsKindsTogetherInTheirOrder) {
  EXPECT_EQ(divided<16>({}), Launches{});
  EXPECT_EQ(divided<16>({5}), (Launches{{0}}));
  EXPECT_EQ(divided<16>({2, 7, 2, 2, 7, 1}), (Launches{{0, 2, 3}, {1, 4}, {5}}));
}

TEST(DivideSteps, FillsLaunchesAlike) {
  const std::vector<uint32_t> kinds(17);
  const Launches launches = divided<16>(kinds);
  ASSERT_EQ(launches.size(), 2U);
  EXPECT_EQ(launches[0].size(), 8U);
  EXPECT_EQ(launches[1].size(), 9U);
  EXPECT_EQ(divided<16>(std::vector<uint32_t>(16)).size(), 1U);
}

template <uint32_t kMost>
void check_random(std::mt19937& rng) {
  std::vector<uint32_t> kinds(rng() % 70);
  const uint32_t most_kinds = 1 + static_cast<uint32_t>(rng() % 6);
  for (uint32_t& kind : kinds) kind = static_cast<uint32_t>(rng()) % most_kinds;
  const Launches launches = divided<kMost>(kinds);
  std::vector<int> seen(kinds.size());
  std::map<uint32_t, std::vector<size_t>> sizes;
  std::map<uint32_t, uint32_t> last;  // of a kind, the newest step that was launched
  for (const auto& launch : launches) {
    ASSERT_FALSE(launch.empty());
    ASSERT_LE(launch.size(), kMost);
    const uint32_t kind = kinds[launch[0]];
    for (const uint32_t i : launch) {
      ASSERT_LT(i, kinds.size());
      ASSERT_EQ(kinds[i], kind);
      seen[i] += 1;
      if (last.contains(kind)) {
        ASSERT_LT(last[kind], i);
      }
      last[kind] = i;
    }
    sizes[kind].push_back(launch.size());
  }
  for (const int times : seen) ASSERT_EQ(times, 1);
  for (const auto& [kind, of] : sizes) {
    const auto [least, most] = std::minmax_element(of.begin(), of.end());
    ASSERT_LE(*most - *least, 1U);
    size_t all = 0;
    for (const size_t n : of) all += n;
    ASSERT_EQ(of.size(), (all + kMost - 1) / kMost);
  }
}

TEST(DivideSteps, TakesEveryStepOnceInAsFewLaunchesAsThereCanBe) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 rng(seed);
  for (uint32_t i = 0; i < test::unless_sanitized(500U, 50U); ++i) {
    check_random<1>(rng);
    check_random<4>(rng);
    check_random<16>(rng);
    if (HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace keyhole::gpu

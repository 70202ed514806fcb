// How fast devices are beside an H100, from the figures that they say of themselves: beside what their makers state.
#include "gpu/device_slowness.h"

#include <gtest/gtest.h>

#include <utility>
#include <vector>

namespace keyhole::gpu {
namespace {

struct Card {
  const char* name;
  DeviceFigures figures;
  double products;  ///< TFLOP/s of fp16 with sums in fp32, dense
  double bytes;     ///< GB/s
};

// Makers' figures at the clock that the device states.
std::vector<Card> cards() {
  return {{"RTX 3090", {8, 6, 1695000, 82, 9751000, 384}, 71.2, 936},
          {"RTX 4090", {8, 9, 2520000, 128, 10501000, 384}, 165.2, 1008},
          {"RTX 5090", {12, 0, 2407000, 170, 14001000, 512}, 209.5, 1792},
          {"A100", {8, 0, 1410000, 108, 1215000, 5120}, 311.9, 1555}};
}

TEST(DeviceSlowness, FollowsWhatMakersState) {
  for (const Card& card : cards()) {
    const DeviceSlowness slowness = slowness_of(card.figures, false);
    // 460 TFLOP/s of an H100, beside six tenths of theirs.
    EXPECT_NEAR(slowness.products * 0.6 * card.products / 460.0, 1.0, 0.02) << card.name;
    EXPECT_NEAR(slowness.memory * card.bytes / 3350.0, 1.0, 0.01) << card.name;
    EXPECT_NEAR(slowness.bus, card.figures.major == 8 ? 1.6 : 1.0, 1e-6) << card.name;
  }
}

TEST(DeviceSlowness, IsOneOfAnH100) {
  const DeviceFigures h100{9, 0, 1980000, 132, 2619000, 5120};
  const DeviceSlowness own = slowness_of(h100, true);
  EXPECT_EQ(own.products, 1.0);
  EXPECT_NEAR(own.memory, 1.0, 0.01);
  EXPECT_EQ(own.bus, 1.0);
  // By the kernels of all devices it is a data centre's, and slower than by its own.
  const double general = slowness_of(h100, false).products;
  EXPECT_GT(general, 1.2);
  EXPECT_LT(general, 2.0);
}

/// Parts of data centres are not told by a capability that ends in 0: 12.0 is a desktop's, 10.3 is none.
TEST(DeviceSlowness, KnowsDataCentres) {
  const auto products_of = [](int major, int minor) {
    return slowness_of({major, minor, 1500000, 100, 2000000, 4096}, false).products;
  };
  for (const auto& [major, minor] : {std::pair{9, 0}, {10, 0}, {10, 3}}) {
    EXPECT_EQ(products_of(major, minor), products_of(8, 0)) << major << '.' << minor;
  }
  for (const auto& [major, minor] : {std::pair{8, 6}, {8, 9}, {12, 0}, {12, 1}}) {
    EXPECT_EQ(products_of(major, minor), 4.0 * products_of(8, 0)) << major << '.' << minor;
  }
}

/// Of memory that is the host's, too, a device may say nothing.
TEST(DeviceSlowness, OfMemoryThatSaysNothingIsAnH100s) {
  EXPECT_EQ(slowness_of({12, 1, 2400000, 48, 0, 0}, false).memory, 1.0);
}

}  // namespace
}  // namespace keyhole::gpu

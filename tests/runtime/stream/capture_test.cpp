#include "runtime/stream/capture.h"

#include <gtest/gtest.h>

namespace keyhole::runtime {
namespace {

TEST(Capture, HoldsNothingAtFirst) {
  const Capture capture;
  EXPECT_TRUE(capture.steps().empty());
  EXPECT_FALSE(capture.is_spoiled());
}

TEST(Capture, HoldsTheStepsOfOneCaptureInTheirOrder) {
  Capture capture;
  for (uint32_t i = 0; i < 3; ++i) {
    capture.enter(7, {2, 5});
    capture.add({i, 0, i != 1, i == 2});
  }
  ASSERT_EQ(capture.steps().size(), 3U);
  for (uint32_t i = 0; i < 3; ++i) {
    EXPECT_EQ(capture.steps()[i].layer, i);
    EXPECT_EQ(capture.steps()[i].appends, i != 1 ? 1U : 0U);
    EXPECT_EQ(capture.steps()[i].coded, i == 2);
  }
  EXPECT_EQ(capture.version(), (GraphVersion{2, 5}));
  EXPECT_NE(capture.version(), (GraphVersion{2, 6}));
  EXPECT_NE(capture.version(), (GraphVersion{3, 5}));
}

TEST(Capture, AnotherNumberBeginsAnew) {
  Capture capture;
  capture.enter(7, {1, 1});
  capture.add({0, 0, true, false});
  capture.spoil();
  EXPECT_TRUE(capture.is_spoiled());
  capture.enter(7, {1, 1});
  EXPECT_TRUE(capture.is_spoiled()) << "the same capture is not whole again";
  capture.enter(8, {4, 1});
  EXPECT_FALSE(capture.is_spoiled());
  EXPECT_TRUE(capture.steps().empty());
  EXPECT_EQ(capture.version(), (GraphVersion{4, 1}));
}

}  // namespace
}  // namespace keyhole::runtime

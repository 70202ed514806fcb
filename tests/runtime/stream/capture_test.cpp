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
  Captures captures;
  for (uint32_t i = 0; i < 3; ++i) {
    captures.enter(7, {2, 5});
    captures.newest().add({i, 0, i != 1, i == 2});
  }
  const Capture& capture = captures.newest();
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
  Captures captures;
  EXPECT_EQ(captures.newest().id(), 0U);
  captures.enter(7, {1, 1});
  captures.newest().add({0, 0, true, false});
  captures.newest().spoil();
  captures.enter(7, {1, 1});
  EXPECT_TRUE(captures.newest().is_spoiled()) << "the same capture is not whole again";
  captures.enter(8, {4, 1});
  EXPECT_FALSE(captures.newest().is_spoiled());
  EXPECT_TRUE(captures.newest().steps().empty());
  EXPECT_EQ(captures.newest().version(), (GraphVersion{4, 1}));
}

TEST(Capture, TheNewestAreKnownByTheirNumbers) {
  Captures captures;
  for (uint64_t id = 1; id <= Captures::kMost + 1; ++id) {
    captures.enter(id, {id, 1});
    captures.newest().add({0, 0, static_cast<uint32_t>(id), false});
  }
  EXPECT_EQ(captures.find(1), nullptr) << "the oldest has gone";
  EXPECT_EQ(captures.find(99), nullptr);
  for (uint64_t id = 2; id <= Captures::kMost + 1; ++id) {
    const Capture* const capture = captures.find(id);
    ASSERT_NE(capture, nullptr) << id;
    EXPECT_EQ(capture->version().settings, id);
    ASSERT_EQ(capture->steps().size(), 1U);
    EXPECT_EQ(capture->steps()[0].appends, id);
  }
}

}  // namespace
}  // namespace keyhole::runtime

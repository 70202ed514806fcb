#include "tools/commands/compare/sweep_clock.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

namespace keyhole::tools {
namespace {

TEST(SweepClock, KnowsTheTimeOfWhatWasDoneBefore) {
  // Two batches of the same: a truth of 1 s, a build of 100 s, two measurements of 3 s and 5 s. Heads: 2, then 1.
  std::vector<SweepClock::Part> parts;
  for (const double heads : {2.0, 1.0}) {
    parts.push_back({"truth", "exact", heads});
    parts.push_back({"build hnsw", "hnsw:M=32", heads});
    parts.push_back({"measure hnsw", "hnsw:M=32 a", heads});
    parts.push_back({"measure hnsw", "hnsw:M=32 b", heads});
  }
  SweepClock clock(parts);
  EXPECT_EQ(clock.fraction(0), 0);
  EXPECT_EQ(clock.current(), "exact");
  clock.done(2, 2);
  EXPECT_EQ(clock.current(), "hnsw:M=32");
  // Shares of threads that work side by side.
  for (int i = 1; i <= 10; ++i) clock.done(0.2, 2 + 20 * i);
  EXPECT_EQ(clock.current(), "hnsw:M=32 a");
  clock.done(1, 205);
  clock.done(1, 208);
  clock.done(2, 218);
  // The second batch has one head: half of what the first took.
  EXPECT_EQ(clock.current(), "exact");
  EXPECT_NEAR(clock.fraction(218), 218.0 / (218 + 109), 1e-9);
  clock.done(1, 219);
  // While a build says nothing of itself the time left goes down with the clock; then its own pace counts.
  EXPECT_NEAR(clock.fraction(229), 229.0 / (229 + 90 + 8), 1e-9);
  clock.done(0.5, 249);
  EXPECT_NEAR(clock.fraction(249), 249.0 / (249 + 30 + 8), 1e-9);
  clock.done(0.5, 279);
  clock.done(1, 282);
  clock.done(1, 287);
  EXPECT_EQ(clock.fraction(287), 1);
  EXPECT_EQ(clock.current(), "");
}

TEST(SweepClock, TakesWhatIsNewForItsKind) {
  SweepClock clock({{"build a", "a:1", 1},
                    {"measure a", "a:1", 1},
                    {"build a", "a:2", 1},
                    {"measure a", "a:2", 1},
                    {"build b", "b", 1}});
  clock.done(1, 10);
  clock.done(1, 12);
  // a:2 as a:1; of b, of which nothing is known, the mean of all: 6.
  EXPECT_NEAR(clock.fraction(12), 12.0 / (12 + 10 + 2 + 6), 1e-9);
}

TEST(SweepClock, StaysWithinItsBoundsWhateverIsReported) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  for (int run = 0; run < 50; ++run) {
    std::vector<SweepClock::Part> parts;
    double steps = 0;
    for (int i = 0; i < 20; ++i) {
      parts.push_back({"k" + std::to_string(random() % 3), std::to_string(random() % 6),
                       static_cast<double>(random() % 4)});
      steps += parts.back().steps;
    }
    SweepClock clock(parts);
    double seconds = 0;
    for (double left = steps; left > 1e-9;) {
      const double more = std::min(left, 0.3 * static_cast<double>(1 + random() % 9));
      left -= more;
      seconds += 0.001 * static_cast<double>(random() % 1000);
      clock.done(more, seconds);
      EXPECT_GE(clock.fraction(seconds), 0);
      EXPECT_LE(clock.fraction(seconds), 1);
    }
    EXPECT_EQ(clock.fraction(seconds), 1) << "all is done";
  }
}

}  // namespace
}  // namespace keyhole::tools

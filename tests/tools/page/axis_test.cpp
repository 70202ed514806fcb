#include "tools/page/axis.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

namespace keyhole::tools {
namespace {

// "20k" and the like, read back.
double value_of(const std::string& tick) {
  size_t read = 0;
  const double value = std::stod(tick, &read);
  const std::string unit = tick.substr(read);
  return value * (unit == "k" ? 1e3 : unit == "M" ? 1e6 : unit == "G" ? 1e9 : 1);
}

double scaled(Scale scale, double value) {
  switch (scale) {
    case Scale::log: return std::log10(value);
    case Scale::nines: return -std::log10(1 - value);
    default: return value;
  }
}

TEST(Axis, PlacesValuesBetweenItsTicks) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  std::uniform_real_distribution<double> unit(0, 1);
  for (const Scale scale : {Scale::linear, Scale::log, Scale::nines}) {
    for (int round = 0; round < 300; ++round) {
      const double middle = std::pow(10, 8 * unit(random) - 3);
      const double width = std::pow(10, 3 * unit(random) - 2);  // from some percent to factors
      std::vector<double> values(1 + random() % 9);
      for (double& v : values) {
        v = middle * std::exp(width * (unit(random) - 0.5));
        if (scale == Scale::nines)
          v = 1 - std::pow(10, -3 * unit(random) * std::min(width, 1.0) - 0.05);
      }
      const Axis axis({"x", "x", scale}, values);
      SCOPED_TRACE("scale " + std::to_string(static_cast<int>(scale)) + ", first value " +
                   std::to_string(values[0]) + " of " + std::to_string(values.size()));
      for (const double v : values) {
        ASSERT_TRUE(axis.shows(v));
        EXPECT_GT(axis.place(v), 0);
        EXPECT_LT(axis.place(v), 1);
      }
      const std::vector<Axis::Tick> ticks = axis.ticks();
      ASSERT_GE(ticks.size(), 2U);
      EXPECT_LE(ticks.size(), 12U);
      // Places are linear in the scale: as the text of two ticks says, so lies every value.
      const Axis::Tick& a = ticks.front();
      const Axis::Tick& b = ticks.back();
      const double from = scaled(scale, value_of(a.text));
      const double to = scaled(scale, value_of(b.text));
      ASSERT_LT(from, to);
      for (const double v : values) {
        const double expected =
            a.place + (scaled(scale, v) - from) / (to - from) * (b.place - a.place);
        EXPECT_NEAR(axis.place(v), expected, 2e-3);
      }
      for (size_t i = 1; i < ticks.size(); ++i) EXPECT_LT(ticks[i - 1].place, ticks[i].place);
    }
  }
}

TEST(Axis, DrawsWhatIsBeyondALimitAtIt) {
  const Axis errors({"e", "e", Scale::log, 1e-3}, {1e-7, 0.5});
  EXPECT_EQ(errors.place(0), errors.place(1e-3));
  EXPECT_TRUE(errors.shows(0));
  EXPECT_FALSE(Axis({"e", "e", Scale::log}, {0.5}).shows(0));
  const Axis mass({"m", "m", Scale::nines, 1e-4}, {0.5, 1});
  EXPECT_EQ(mass.place(1), mass.place(0.9999));
  EXPECT_FALSE(Axis({"m", "m", Scale::nines}, {0.5}).shows(1));
}

TEST(Axis, ShowsNothingThatIsNoNumber) {
  const double nan = std::nan("");
  for (const Scale scale : {Scale::linear, Scale::log, Scale::nines}) {
    const Axis axis({"x", "x", scale}, {nan, INFINITY});
    EXPECT_FALSE(axis.shows(nan));
    EXPECT_FALSE(axis.shows(INFINITY));
    EXPECT_GE(axis.ticks().size(), 2U);
  }
}

}  // namespace
}  // namespace keyhole::tools

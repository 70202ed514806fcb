// Caches in few bits as rivals: all rows are attended as the cache gives them back, and their bits are counted.
#include <gtest/gtest.h>

#include <cmath>

#include "tests/tools/rivals/rival_case.h"
#include "tools/caches/kivi.h"
#include "tools/terminal/errors.h"

namespace keyhole::tools {
namespace {

/// The mean error of the outputs of some steps, relative to exact attention's.
double output_error_of(const RivalCase& on, Rival& rival, uint64_t* bytes_read) {
  RivalStep step(rival, on.stored, on.shape, on.rule, 1);
  double sum = 0;
  for (size_t row = 0; row < 3 * on.shape.group; row += on.shape.group) {
    step.run(on.query(row));
    EXPECT_EQ(step.distinct.size(), on.shape.rows);
    *bytes_read = step.bytes_read;
    for (size_t j = 0; j < on.shape.group; ++j) {
      const RivalCase::Sums exact = on.sums(row + j);
      double squares = 0, all = 0;
      for (size_t c = 0; c < on.shape.dim; ++c) {
        const double o = exact.values[c] / exact.weights;
        squares += std::pow(step.o[j * on.shape.dim + c] - o, 2);
        all += o * o;
      }
      sum += std::sqrt(squares / all) / static_cast<double>(3 * on.shape.group);
    }
  }
  return sum;
}

TEST(CacheFormats, AttendToAllRowsInTheirBits) {
  std::mt19937 random(6);
  RivalCase on(random, 300, 64, 2);
  on.rule.scale = 0.05F;
  const struct {
    const char* name;
    double bits, most;  // of all 300 rows; the error
  } rivals[] = {{"q8_0", 8.5, 0.02},
                {"q4_0", 4.5, 0.15},
                // Keys: 256 in few bits and 44 in 16; values: 288 and 12.
                {"kivi4", (256 + 288) / 600.0 * 5 + (44 + 12) / 600.0 * 16, 0.15},
                {"kivi2", (256 + 288) / 600.0 * 3 + (44 + 12) / 600.0 * 16, 0.8},
                {"kvarn2", 256 / 300.0 * (2.5 + 2.625) / 2 + 44 / 300.0 * 16, 0.8},
                {"kvarn_k4v2", 256 / 300.0 * (4.5 + 2.625) / 2 + 44 / 300.0 * 16, 0.8},
                {"oscar2", 288 / 300.0 * 2.5 + 12 / 300.0 * 16, 0.9}};
  double last = 0;
  for (const auto& [name, bits, most] : rivals) {
    const auto rival = build_rival(on, name);
    uint64_t bytes = 0;
    const double error = output_error_of(on, *rival, &bytes);
    EXPECT_NEAR(static_cast<double>(bytes), bits / 8 * 2 * 300 * 64, 1) << name;
    EXPECT_LT(error, most) << name;
    EXPECT_GT(error, 1e-4) << name;
    if (std::string(name) == "q8_0") last = error;
    if (std::string(name) == "q4_0") {
      EXPECT_GT(error, 4 * last);
    }
    EXPECT_EQ(rival->bytes(), 0U);
  }
}

// What a step attends is what the format gives back, row for row.
TEST(CacheFormats, AttendToWhatTheFormatGivesBack) {
  std::mt19937 random(7);
  RivalCase on(random, 160, 32, 1);
  const auto rival = build_rival(on, "kivi2");
  uint64_t bytes = 0;
  (void)output_error_of(on, *rival, &bytes);
  RivalStep step(*rival, on.stored, on.shape, on.rule, 1);
  step.run(on.query(0));
  const auto kivi = make_kivi(2, 32);
  kivi->pass(0, 0, KvRows::keys, on.keys.data(), 128);
  kivi->pass(0, 0, KvRows::values, on.values.data(), 160);
  const RivalCase::Sums held = on.sums(0);
  for (size_t c = 0; c < 32; ++c) EXPECT_NEAR(step.o[c], held.values[c] / held.weights, 1e-4);
  EXPECT_NEAR(step.lse[0], std::log(held.weights), 1e-4);
}

TEST(CacheFormats, RefuseHeadsAndTracesThatDoNotFit) {
  std::mt19937 random(8);
  const RivalCase odd(random, 50, 24, 1);
  for (const char* name : {"q4_0", "kivi2", "kvarn2", "oscar2"}) {
    EXPECT_THROW((void)build_rival(odd, name), UsageError) << name;
  }
  const RivalCase untrained(random, 50, 32, 1, 3, 0);
  EXPECT_THROW((void)build_rival(untrained, "oscar2"), UsageError);
}

}  // namespace
}  // namespace keyhole::tools

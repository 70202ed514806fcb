// q8_0 and q4_0 against a reference in double precision, written from the formats' definition.
#include "tools/caches/kv_format.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "tests/normal.h"

namespace keyhole::tools {
namespace {

using Block = std::array<float, kKvFormatBlock>;

Block through(KvFormat format, Block block) {
  pass_through(format, block.data(), block.size());
  return block;
}

/// A scale as fp16, by counting in steps of fp16's spacing.
double as_f16(double x) {
  if (x == 0) return 0;
  const int exponent = std::max(std::ilogb(x), -14);
  const double step = std::ldexp(1.0, exponent - 10);
  return std::nearbyint(x / step) * step;  // to even, the default rounding
}

/// The level of every number: what a cache would hold in 8 or 4 bits.
Block format_reference(KvFormat format, const Block& block) {
  double signed_most = 0;
  for (const float x : block) {
    if (std::abs(double{x}) > std::abs(signed_most)) signed_most = x;
  }
  const bool eight = format == KvFormat::q8_0;
  const double scale = eight ? std::abs(signed_most) / 127 : signed_most / -8;
  Block out{};
  if (scale == 0) return out;
  for (size_t i = 0; i < block.size(); ++i) {
    const double x = block[i] / scale;
    double level = 0;
    if (eight) {
      level = std::round(x);
      EXPECT_LE(std::abs(level), 127);
    } else {
      const int code = std::min(15, static_cast<int>(x + 8.5));
      EXPECT_GE(code, 0);
      level = code - 8;
    }
    out[i] = static_cast<float>(level * as_f16(scale));
  }
  return out;
}

/// Whether x / scale is so near to where levels change that fp32 may round to the other one.
bool is_between_levels(KvFormat format, const Block& block, size_t i) {
  double most = 0;
  for (const float x : block) most = std::max(most, std::abs(double{x}));
  const double x = block[i] / (format == KvFormat::q8_0 ? most / 127 : most / 8);
  return std::abs(x - std::floor(x) - 0.5) < 1e-4;
}

TEST(KvFormat, TurnsByTheWalshHadamardMatrix) {
  std::mt19937 random(11);
  std::normal_distribution<float> normal;
  for (const uint32_t size : {1U, 2U, 64U, 256U}) {
    std::vector<float> numbers(3 * size);
    for (float& x : numbers) x = normal(random);
    std::vector<float> turned = numbers;
    walsh_hadamard(turned.data(), turned.size(), size);
    for (size_t i = 0; i < numbers.size(); ++i) {
      // Row r, column c: the sign is the parity of the bits that both have.
      double sum = 0;
      for (uint32_t c = 0; c < size; ++c) {
        const double sign = std::popcount(i % size & c) % 2 == 0 ? 1 : -1;
        sum += sign * numbers[i / size * size + c];
      }
      ASSERT_NEAR(turned[i], sum / std::sqrt(double{1} * size), 1e-5) << size;
    }
    walsh_hadamard(turned.data(), turned.size(), size);
    for (size_t i = 0; i < numbers.size(); ++i) ASSERT_NEAR(turned[i], numbers[i], 1e-5);
  }
}

// As llama.cpp turns them: keys by the largest matrix that fits, values by 64, nothing where a head is no multiple of
// 64.
TEST(KvFormat, TurnsRowsThatAreRounded) {
  EXPECT_EQ(rotated_together(KvFormat::q4_0, 128, false), 128U);
  EXPECT_EQ(rotated_together(KvFormat::q4_0, 192, false), 64U);
  EXPECT_EQ(rotated_together(KvFormat::q8_0, 256, true), 64U);
  EXPECT_EQ(rotated_together(KvFormat::q8_0, 80, false), 0U);
  EXPECT_EQ(rotated_together(KvFormat::q4_0_plain, 128, false), 0U);
  std::mt19937 random(12);
  std::normal_distribution<float> normal;
  std::vector<float> rows(2 * 128);
  for (float& x : rows) x = normal(random);
  rows[5] = rows[133] = 100.0F;  // a channel that takes the steps of all 31 beside it
  const auto error = [&](KvFormat format) {
    std::vector<float> through = rows;
    pass_rows(format, through.data(), through.size(), 128, false);
    double squares = 0;
    for (size_t i = 0; i < rows.size(); ++i) {
      if (i % 128 != 5) squares += (through[i] - rows[i]) * (through[i] - rows[i]);
    }
    return std::sqrt(squares / static_cast<double>(rows.size()));
  };
  std::vector<float> plain = rows, once = rows;
  pass_rows(KvFormat::q4_0_plain, plain.data(), plain.size(), 128, false);
  pass_through(KvFormat::q4_0, once.data(), once.size());
  EXPECT_EQ(plain, once);
  // A block's numbers are 0 beside the outlier's step of 12.5; turned, it is 8.8 in each of 128 numbers, and a step
  // some 1.5.
  EXPECT_LT(error(KvFormat::q4_0), 0.7);
  EXPECT_LT(error(KvFormat::q8_0), 0.05);
  EXPECT_GT(error(KvFormat::q4_0), 0.1);
}

TEST(KvFormat, GivesBackWhatTheDefinitionSays) {
  for (const KvFormat format : {KvFormat::q8_0, KvFormat::q4_0}) {
    for (uint32_t seed = 0; seed < 200; ++seed) {
      SCOPED_TRACE(::testing::Message() << kv_format_bits(format) << " bits, seed " << seed);
      std::mt19937 random(seed);
      keyhole::test::Normal<float> normal;
      const float size = std::exp2(static_cast<float>(seed % 24) - 12.0F);
      Block block;
      for (float& x : block) x = size * normal(random);
      const Block expected = format_reference(format, block);
      const Block got = through(format, block);
      size_t compared = 0;
      for (size_t i = 0; i < block.size(); ++i) {
        if (is_between_levels(format, block, i)) continue;
        EXPECT_FLOAT_EQ(got[i], expected[i]) << block[i];
        ++compared;
      }
      EXPECT_GT(compared, 28U);
    }
  }
}

TEST(KvFormat, ErrorsAreThoseOfSoManyBits) {
  std::mt19937 random(7);
  keyhole::test::Normal<float> normal;
  std::vector<float> numbers(32 * 1000);
  for (float& x : numbers) x = normal(random);
  const auto relative = [&](KvFormat format) {
    std::vector<float> rounded = numbers;
    pass_through(format, rounded.data(), rounded.size());
    double squares = 0;
    double all = 0;
    for (size_t i = 0; i < numbers.size(); ++i) {
      squares += std::pow(double{rounded[i]} - numbers[i], 2);
      all += std::pow(double{numbers[i]}, 2);
    }
    return std::sqrt(squares / all);
  };
  // A step of max|x| / 127 or / 8, where max|x| of 32 normal numbers is near 2.1, and an error of step / sqrt(12).
  EXPECT_NEAR(relative(KvFormat::q8_0), 2.1 / 127 / std::sqrt(12.0), 0.0007);
  EXPECT_NEAR(relative(KvFormat::q4_0), 2.1 / 8 / std::sqrt(12.0), 0.012);
}

TEST(KvFormat, HoldsTheLargestAndCutsItsOpposite) {
  Block block{};
  block[3] = -2.0F;
  block[9] = 2.0F;  // 8 steps of d = 0.25 away from zero on the side that has 7
  const Block four = through(KvFormat::q4_0, block);
  EXPECT_EQ(four[3], -2.0F);
  EXPECT_EQ(four[9], 1.75F);
  EXPECT_EQ(four[0], 0.0F);
  Block other{};
  other[3] = 2.0F;  // the first of equal magnitudes is held
  other[9] = -2.0F;
  EXPECT_EQ(through(KvFormat::q4_0, other)[3], 2.0F);
  EXPECT_EQ(through(KvFormat::q4_0, other)[9], -1.75F);
  const Block eight = through(KvFormat::q8_0, block);
  EXPECT_NEAR(eight[3], -2.0, 0.001);
  EXPECT_EQ(eight[9], -eight[3]);
}

TEST(KvFormat, BlocksDoNotKnowEachOther) {
  std::vector<float> numbers(96, 0.001F);
  for (size_t i = 32; i < 64; ++i) numbers[i] = 1000.0F;
  pass_through(KvFormat::q4_0, numbers.data(), numbers.size());
  EXPECT_NEAR(numbers[0], 0.001, 1e-5);
  EXPECT_NEAR(numbers[40], 1000.0, 1.0);
  EXPECT_NEAR(numbers[95], 0.001, 1e-5);
}

TEST(KvFormat, ZerosStayZerosAndWhatIsNoNumberShows) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  for (const KvFormat format : {KvFormat::q8_0, KvFormat::q4_0}) {
    for (const float x : through(format, Block{})) EXPECT_EQ(x, 0.0F);
    Block tiny{};
    tiny[5] = std::numeric_limits<float>::denorm_min();  // fp16 has no such scale
    for (const float x : through(format, tiny)) EXPECT_EQ(x, 0.0F);
    for (const float bad : {std::nanf(""), kInf, -kInf, 1e30F}) {  // 1e30: a scale above 65504
      std::vector<float> numbers(64, 1.0F);
      numbers[7] = bad;
      pass_through(format, numbers.data(), numbers.size());
      for (size_t i = 0; i < 32; ++i) EXPECT_TRUE(std::isnan(numbers[i])) << bad << " at " << i;
      for (size_t i = 32; i < 64; ++i) EXPECT_NEAR(numbers[i], 1.0, 0.01) << bad;
    }
  }
}

TEST(KvFormat, TakesTheBytesOfItsBlocks) {
  EXPECT_EQ(kv_format_bytes(KvFormat::q8_0, 64), 68U);
  EXPECT_EQ(kv_format_bytes(KvFormat::q4_0, 64), 36U);
  EXPECT_EQ(kv_format_bits(KvFormat::q8_0), 8.5);
  EXPECT_EQ(kv_format_bits(KvFormat::q4_0), 4.5);
}

}  // namespace
}  // namespace keyhole::tools

// KIVI's groups, rounding and bits against a reference in double precision.
#include "tools/caches/kivi.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <stdexcept>
#include <vector>

#include "tests/normal.h"
#include "tests/tools/caches/affine_reference.h"
#include "tools/caches/affine_codes.h"

namespace keyhole::tools {
namespace {

std::vector<float> kivi_rows(uint32_t seed, size_t count, size_t dim) {
  std::mt19937 random(seed);
  keyhole::test::Normal<float> normal;
  std::vector<float> rows(count * dim);
  for (size_t i = 0; i < rows.size(); ++i) {
    // A channel of large numbers, as keys have.
    rows[i] = normal(random) + (i % dim == 5 ? 40.0F : 0.0F);
  }
  return rows;
}

TEST(Kivi, RoundsKeysByChannelAndValuesByToken) {
  constexpr size_t kTokens = 96, kDim = 64;
  for (const int bits : {2, 4}) {
    const auto kivi = make_kivi(bits, kDim);
    for (const KvRows kind : {KvRows::keys, KvRows::values}) {
      const uint32_t seed = 17 + bits;
      SCOPED_TRACE(::testing::Message() << bits << " bits, seed " << seed);
      const std::vector<float> rows = kivi_rows(seed, kTokens, kDim);
      std::vector<float> through = rows;
      kivi->pass(0, 0, kind, through.data(), kTokens);
      size_t compared = 0;
      // Group g of 32: of keys tokens of one channel, of values channels of one token.
      for (size_t g = 0; g < kTokens * kDim / 32; ++g) {
        std::vector<size_t> places;
        for (size_t i = 0; i < 32; ++i) {
          places.push_back(kind == KvRows::keys ? (g / kDim * 32 + i) * kDim + g % kDim
                                                : g * 32 + i);
        }
        std::vector<double> group;
        for (const size_t place : places) group.push_back(rows[place]);
        const AffineReference expected = affine_reference(group, bits);
        for (size_t i = 0; i < 32; ++i) {
          if (expected.between[i]) continue;
          ASSERT_NEAR(through[places[i]], expected.numbers[i],
                      1e-6 * std::abs(expected.numbers[i]) + 1e-6)
              << "group " << g << " number " << i;
          ++compared;
        }
      }
      EXPECT_GT(compared, kTokens * kDim * 99 / 100);
    }
  }
}

TEST(Kivi, KeepsTheResidualIn16Bits) {
  const AgingLayout layout = kivi_layout(2, 64);
  const auto end = [&](KvRows kind, uint32_t tokens) {
    const TokenRange few = layout.in_few_bits(kind, tokens);
    EXPECT_EQ(few.begin, 0U);
    return few.end;
  };
  // Keys: 128 at once, as soon as there are so many.
  EXPECT_EQ(end(KvRows::keys, 127), 0U);
  EXPECT_EQ(end(KvRows::keys, 128), 128U);
  EXPECT_EQ(end(KvRows::keys, 383), 256U);
  // Values: all but the newest 128, in runs of 32.
  EXPECT_EQ(end(KvRows::values, 128), 0U);
  EXPECT_EQ(end(KvRows::values, 159), 0U);
  EXPECT_EQ(end(KvRows::values, 160), 32U);
  EXPECT_EQ(end(KvRows::values, 383), 224U);
  EXPECT_EQ(layout.settled(383), 224U);
}

TEST(Kivi, CountsTheBitsOfStepsAndZeroPoints) {
  // 32 numbers of 2 bits, then two fp16.
  EXPECT_EQ(kivi_layout(2, 64).bits(), (32 * 2 + 2 * 16) / 32.0);
  EXPECT_EQ(kivi_layout(4, 64).bits(), 5.0);
  EXPECT_EQ(cache_bits(KvFormat::kivi2, 128), 3.0);
  // After 383 tokens: 256 keys and 224 values in 3 bits, 127 and 159 in 16.
  EXPECT_EQ(cache_bytes(KvFormat::kivi2, 64, 6, 383),
            6U * 64 * ((256 + 224) * 3 + (127 + 159) * 16) / 8);
  EXPECT_EQ(cache_bytes(KvFormat::q4_0, 64, 6, 100), 6U * 2 * 100 * 64 / 32 * 18);
  for (const uint32_t dim : {0U, 1U, 33U, 80U}) {
    EXPECT_THROW((void)kivi_layout(2, dim), std::invalid_argument) << dim;
  }
}

TEST(AffineCodes, HoldBothEndsAndShowWhatIsNoNumber) {
  std::vector<float> x = {-1.0F, 9.0F, 2.0F,
                          9.0F,  0.4F, 9.0F};  // a stride of 2: the 9s are others'
  round_affine(x.data(), 3, 2, 2);
  EXPECT_EQ(x, (std::vector<float>{-1.0F, 9.0F, 2.0F, 9.0F, 0.0F, 9.0F}));
  std::vector<float> equal(32, 0.25F);
  round_affine(equal.data(), equal.size(), 1, 2, 3.0F);
  EXPECT_EQ(equal, std::vector<float>(32, 0.75F));
  constexpr float kInf = std::numeric_limits<float>::infinity();
  for (const float bad : {std::nanf(""), kInf, -kInf, 1e30F}) {  // 1e30: a step above 65504
    std::vector<float> group(32, 1.0F);
    group[7] = bad;
    round_affine(group.data(), group.size(), 1, 4);
    for (const float y : group) EXPECT_TRUE(std::isnan(y)) << bad;
  }
}

}  // namespace
}  // namespace keyhole::tools

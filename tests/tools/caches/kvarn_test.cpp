// KVarN's normalisation, rounding and bits against the definition in double precision.
#include "tools/caches/kvarn.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <random>
#include <stdexcept>
#include <vector>

#include "tests/normal.h"
#include "tests/tools/caches/affine_reference.h"

namespace keyhole::tools {
namespace {

constexpr size_t kTokens = 128;

/// A tile with a large channel, and a token ten times as large as others.
std::vector<float> kvarn_tile(uint32_t seed, size_t dim) {
  std::mt19937 random(seed);
  keyhole::test::Normal<float> normal;
  std::vector<float> tile(kTokens * dim);
  for (size_t i = 0; i < tile.size(); ++i) {
    tile[i] = normal(random) * (i / dim == 77 ? 10.0F : 1.0F) + (i % dim == 3 ? 20.0F : 0.0F);
  }
  return tile;
}

std::vector<double> turned(const std::vector<double>& tile, size_t dim) {
  std::vector<double> out(tile.size());
  const double length = std::sqrt(static_cast<double>(dim));
  for (size_t i = 0; i < tile.size(); ++i) {
    for (size_t c = 0; c < dim; ++c) {
      const double sign = std::popcount((i % dim) & c) % 2 == 0 ? 1 : -1;
      out[i] += sign * tile[i / dim * dim + c] / length;
    }
  }
  return out;
}

double deviation(const std::vector<double>& x) {
  double mean = 0, squares = 0;
  for (const double y : x) mean += y / static_cast<double>(x.size());
  for (const double y : x) squares += (y - mean) * (y - mean) / static_cast<double>(x.size());
  return std::sqrt(squares);
}

std::vector<double> line(const std::vector<double>& tile, size_t first, size_t count,
                         size_t stride) {
  std::vector<double> out;
  for (size_t i = 0; i < count; ++i) out.push_back(tile[first + i * stride]);
  return out;
}

TEST(Kvarn, GivesChannelsAndTokensTheSameVariance) {
  constexpr size_t kDim = 64;
  const std::vector<float> tile = kvarn_tile(5, kDim);
  std::vector<float> normal = tile;
  const VarianceScales scales = normalise_variance(normal.data(), kTokens, kDim);
  const std::vector<double> x(normal.begin(), normal.end());
  for (size_t t = 0; t < kTokens; ++t) {
    EXPECT_NEAR(deviation(line(x, t * kDim, kDim, 1)), 1, 1e-5) << "token " << t;
  }
  const double of_first = deviation(line(x, 0, kTokens, kDim));
  double logs = 0;
  for (size_t c = 0; c < kDim; ++c) {
    EXPECT_NEAR(deviation(line(x, c, kTokens, kDim)), of_first, 1e-3) << "channel " << c;
  }
  for (const double factor : scales.of_token) logs += std::log(factor);
  EXPECT_NEAR(logs, 0, 1e-9);
  for (size_t i = 0; i < x.size(); ++i) {
    ASSERT_NEAR(x[i] * scales.of_channel[i % kDim] * scales.of_token[i / kDim], tile[i], 1e-4);
  }
  // What does not vary has no variance to divide by.
  std::vector<float> equal(kTokens * kDim, 2.0F);
  const VarianceScales ones = normalise_variance(equal.data(), kTokens, kDim);
  for (const double factor : ones.of_channel) EXPECT_NEAR(factor, 1, 1e-12);
  EXPECT_EQ(equal, std::vector<float>(kTokens * kDim, 2.0F));
}

/// What a tile of keys or values gives back, and where fp32 may choose another code.
void expect_tile(KvRows kind, int bits, uint32_t seed, size_t dim) {
  SCOPED_TRACE(::testing::Message() << bits << " bits, d " << dim << ", seed " << seed);
  const std::vector<float> tile = kvarn_tile(seed, dim);
  std::vector<double> x = turned({tile.begin(), tile.end()}, dim);
  std::vector<double> channels(dim, 1), tokens(kTokens, 1);
  for (int i = 0; i < 16; ++i) {
    for (size_t c = 0; c < dim; ++c) {
      const double by = deviation(line(x, c, kTokens, dim));
      channels[c] *= by;
      for (size_t t = 0; t < kTokens; ++t) x[t * dim + c] /= by;
    }
    for (size_t t = 0; t < kTokens; ++t) {
      const double by = deviation(line(x, t * dim, dim, 1));
      tokens[t] *= by;
      for (size_t c = 0; c < dim; ++c) x[t * dim + c] /= by;
    }
  }
  double mean = 1;
  for (const double token : tokens) mean *= std::pow(token, 1.0 / kTokens);
  for (double& token : tokens) token /= mean;
  for (double& channel : channels) channel *= mean;
  std::vector<double> expected(x.size());
  double doubt = 0;  // the length of what other codes may add to a row, at most
  const bool keys = kind == KvRows::keys;
  for (size_t g = 0; g < (keys ? dim : kTokens); ++g) {
    const size_t first = keys ? g : g * dim, count = keys ? kTokens : dim, stride = keys ? dim : 1;
    const AffineReference group =
        affine_reference(line(x, first, count, stride), bits, keys ? channels[g] : tokens[g]);
    for (size_t i = 0; i < count; ++i) {
      const double other = nearest_fp16(keys ? tokens[i] : channels[i]);
      expected[first + i * stride] = group.numbers[i] * other;
      if (group.between[i]) doubt = std::max(doubt, group.step * other);
    }
  }
  expected = turned(expected, dim);
  std::vector<float> through = tile;
  make_kvarn({static_cast<unsigned>(bits), static_cast<unsigned>(bits)}, static_cast<uint32_t>(dim))
      ->pass(0, 0, kind, through.data(), kTokens);
  size_t close = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    // A number whose code fp32 chose otherwise moves its whole row a little.
    ASSERT_NEAR(through[i], expected[i], 3 * doubt + 1e-3 * std::abs(expected[i]) + 1e-3);
    close += std::abs(through[i] - expected[i]) < 2e-3 * std::abs(expected[i]) + 2e-3 ? 1 : 0;
  }
  EXPECT_GT(close, expected.size() * 9 / 10);
}

TEST(Kvarn, RoundsKeysByChannelAndValuesByToken) {
  expect_tile(KvRows::keys, 2, 21, 64);
  expect_tile(KvRows::values, 2, 22, 64);
  expect_tile(KvRows::keys, 4, 23, 128);
  expect_tile(KvRows::values, 4, 24, 32);
}

// A token ten times as large takes no step of the others, which stay as near as without it.
TEST(Kvarn, LargeTokensDoNotBlurOthers) {
  constexpr size_t kDim = 64;
  const auto error_of_others = [&](float size) {
    std::mt19937 random(9);
    keyhole::test::Normal<float> normal;
    std::vector<float> tile(kTokens * kDim);
    for (float& x : tile) x = normal(random);
    for (size_t c = 0; c < kDim; ++c) tile[77 * kDim + c] *= size;
    std::vector<float> through = tile;
    make_kvarn({2, 2}, kDim)->pass(0, 0, KvRows::keys, through.data(), kTokens);
    double squares = 0;
    for (size_t i = 0; i < tile.size(); ++i) {
      if (i / kDim != 77) squares += std::pow(double{through[i]} - tile[i], 2);
    }
    return squares;
  };
  EXPECT_LT(error_of_others(100.0F), 1.1 * error_of_others(1.0F));
}

TEST(Kvarn, CountsTheBitsOfAllScales) {
  // A tile of keys of 128 channels: 2 bits, then for each channel two fp16, for each token one.
  const double tile = 128 * 128;
  EXPECT_EQ(kvarn_layout({2, 2}, 128).keys.bits, (tile * 2 + 128 * 32 + 128 * 16) / tile);
  EXPECT_EQ(kvarn_layout({4, 2}, 128).values.bits, (tile * 2 + 128 * 32 + 128 * 16) / tile);
  EXPECT_EQ(kvarn_layout({4, 2}, 64).keys.bits, (64 * 128 * 4 + 64 * 32 + 128 * 16) / (64.0 * 128));
  EXPECT_EQ(kvarn_layout({4, 2}, 64).values.bits,
            (64 * 128 * 2 + 128 * 32 + 64 * 16) / (64.0 * 128));
  // Of 256 channels, values have two groups a token.
  EXPECT_EQ(kvarn_layout({2, 2}, 256).values.bits, 2 + 32 / 128.0 + 16 / 128.0);
  for (const uint32_t dim : {0U, 7U, 48U}) {
    EXPECT_THROW((void)kvarn_layout({2, 2}, dim), std::invalid_argument) << dim;
  }
  // The first tile, and the unfinished one, stay.
  const AgingLayout layout = kvarn_layout({2, 2}, 64);
  EXPECT_EQ(layout.in_few_bits(KvRows::keys, 100), (TokenRange{128, 128}));
  EXPECT_EQ(layout.in_few_bits(KvRows::keys, 255), (TokenRange{128, 128}));
  EXPECT_EQ(layout.in_few_bits(KvRows::values, 256), (TokenRange{128, 256}));
  EXPECT_EQ(layout.settled(100), 100U);
  EXPECT_EQ(layout.settled(511), 384U);
}

}  // namespace
}  // namespace keyhole::tools

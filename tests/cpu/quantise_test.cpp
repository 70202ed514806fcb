#include "cpu/quantise.h"

#include "tests/cpu/reference.h"

namespace keyhole::cpu::test {
namespace {

/// The error bound of the header; the quotient's own rounding adds an epsilon's worth of 127 steps.
void expect_quantised(const double* exact, uint32_t dim, const int8_t* q, float scale) {
  double largest = 0.0;
  for (uint32_t j = 0; j < dim; ++j) largest = std::max(largest, std::fabs(exact[j]));
  ASSERT_NEAR(scale, largest / 127.0, largest / 127.0 * 1e-6);
  for (uint32_t j = 0; j < dim; ++j) {
    ASSERT_GE(q[j], -127);
    ASSERT_NEAR(double{scale} * q[j], exact[j], double{scale} * (0.5 + 2e-5)) << "element " << j;
  }
}

TEST(QuantiseRow, ErrorIsHalfAStepForAnyMagnitude) {
  Rng rng(41);
  for (const double sigma : {1e-30, 1e-3, 1.0, 1e4, 1e37}) {
    for (const uint32_t dim : kHeadDims) {
      const TestRows row(1, dim, DType::f32, 0, gaussian(rng, sigma));
      const GuardedArray<int8_t> q(dim);
      const float scale =
          quantise_row(reinterpret_cast<const float*>(row.view.data), dim, q.data());
      expect_quantised(row.exact.data(), dim, q.data(), scale);
    }
  }
}

TEST(QuantiseRow, TheLargestElementIsPlusOrMinus127) {
  std::vector<float> row(64, 0.25F);
  row[10] = -3.7F;
  int8_t q[64];
  quantise_row(row.data(), 64, q);
  EXPECT_EQ(q[10], -127);
  row[11] = 3.7F;
  quantise_row(row.data(), 64, q);
  EXPECT_EQ(q[10], -127);
  EXPECT_EQ(q[11], 127);
}

TEST(QuantiseRow, TiesGoToEven) {
  std::vector<float> row(64, 0.0F);
  row[0] = 127.0F;  // scale 1
  const float in[] = {0.5F, 1.5F, 2.5F, -0.5F, -1.5F, -2.5F, 125.5F};
  const int expected[] = {0, 2, 2, 0, -2, -2, 126};
  std::copy(std::begin(in), std::end(in), row.begin() + 1);
  int8_t q[64];
  EXPECT_EQ(quantise_row(row.data(), 64, q), 1.0F);
  for (int i = 0; i < 7; ++i) EXPECT_EQ(q[i + 1], expected[i]) << in[i];
}

TEST(QuantiseRow, ZerosHaveScaleZero) {
  const std::vector<float> row(80, -0.0F);
  int8_t q[80];
  std::fill(std::begin(q), std::end(q), int8_t{5});
  EXPECT_EQ(quantise_row(row.data(), 80, q), 0.0F);
  for (const int8_t x : q) EXPECT_EQ(x, 0);
}

TEST(QuantiseRow, SubnormalRowsStayWithinRange) {
  const float unit = std::numeric_limits<float>::denorm_min();
  for (int largest = 1; largest < 1000; ++largest) {
    std::vector<float> row(64, 0.0F);
    row[3] = -unit * static_cast<float>(largest);
    int8_t q[64];
    const float scale = quantise_row(row.data(), 64, q);
    EXPECT_NEAR(double{scale} * q[3], double{row[3]},
                std::max(double{scale}, double{unit} * 127) / 2)
        << largest;
  }
}

// ---- Channels of a block ------------------------------------------------------------------------

/// A block of rows `[n, dim]` by ChannelQuantiser.
struct ChannelBlock {
  std::vector<int8_t> q;
  std::vector<uint16_t> scales;
  size_t n;
  uint32_t dim;

  ChannelBlock(const std::vector<float>& rows, uint32_t channels,
               float most = std::numeric_limits<float>::max())
      : q(rows.size()), scales(channels), n(rows.size() / channels), dim(channels) {
    ChannelQuantiser quantiser(dim);
    for (size_t i = 0; i < n; ++i) quantiser.look(rows.data() + i * dim);
    quantiser.choose_scales(most, scales.data());
    for (size_t i = 0; i < n; ++i) quantiser.write(rows.data() + i * dim, q.data() + i * dim);
  }
  [[nodiscard]] double scale(uint32_t j) const { return decode_half(scales[j], DType::bf16); }
  [[nodiscard]] double value(size_t i, uint32_t j) const { return scale(j) * q[i * dim + j]; }
};

std::vector<float> random_block(Rng& rng, uint32_t dim, double sigma) {
  std::vector<float> rows(size_t{256} * dim);
  auto value = gaussian(rng, sigma);
  for (float& x : rows) x = static_cast<float>(value());
  return rows;
}

TEST(QuantiseChannels, ErrorIsHalfAScaleAndScalesAreTheLargestElements) {
  Rng rng(42);
  for (const double sigma : {1e-25, 1e-3, 1.0, 1e4, 1e37}) {
    for (const uint32_t dim : kHeadDims) {
      const auto rows = random_block(rng, dim, sigma);
      const ChannelBlock block(rows, dim);
      for (uint32_t j = 0; j < dim; ++j) {
        double most = 0.0;
        for (size_t i = 0; i < 256; ++i) {
          most = std::max(most, std::fabs(double{rows[i * dim + j]}));
        }
        ASSERT_NEAR(block.scale(j), most / 127.0, most / 127.0 / 256.0 * 1.0001);
        for (size_t i = 0; i < 256; ++i) {
          ASSERT_GE(block.q[i * dim + j], -127);
          ASSERT_NEAR(block.value(i, j), rows[i * dim + j], block.scale(j) * (0.5 + 2e-5));
        }
      }
    }
  }
}

TEST(QuantiseChannels, AnOutlierChannelCostsTheOthersNothing) {
  Rng rng(43);
  auto rows = random_block(rng, 64, 1.0);
  const ChannelBlock before(rows, 64);
  for (size_t i = 0; i < 256; ++i) rows[i * 64 + 7] *= 64.0F;
  const ChannelBlock after(rows, 64);
  EXPECT_EQ(before.q, after.q);
  EXPECT_EQ(after.scale(7), 64.0 * before.scale(7));
}

TEST(QuantiseChannels, ZeroAndTinyChannelsAreZeros) {
  std::vector<float> rows(size_t{256} * 64, 0.0F);
  for (size_t i = 0; i < 256; ++i) {
    rows[i * 64 + 1] = i % 2 == 0 ? 1e-40F : -9e-31F;
    rows[i * 64 + 2] = 3.0F;
  }
  const ChannelBlock block(rows, 64);
  for (size_t i = 0; i < 256; ++i) {
    EXPECT_EQ(block.value(i, 0), 0.0);
    EXPECT_EQ(block.value(i, 1), 0.0);
    EXPECT_EQ(block.q[i * 64 + 1], 0);
    EXPECT_NEAR(block.value(i, 2), 3.0, block.scale(2) / 2);
  }
}

// What comes back from int8 must fit into the dtype that it came from.
TEST(QuantiseChannels, NothingPassesTheLargestNumberOfTheDtype) {
  Rng rng(44);
  for (const double most : {65504.0, 0x1.FEp127, double{std::numeric_limits<float>::max()}}) {
    for (int round = 0; round < 200; ++round) {
      std::vector<float> rows(size_t{256} * 64, 0.0F);
      for (uint32_t j = 0; j < 64; ++j) {
        const double largest = most * (1.0 - 0.01 * static_cast<double>(rng() % 1000) / 1000);
        rows[j] = static_cast<float>(largest);
        rows[64 + j] = static_cast<float>(-largest);
        rows[128 + j] = static_cast<float>(largest / 3);
      }
      const ChannelBlock block(rows, 64, static_cast<float>(most));
      for (size_t i = 0; i < 4; ++i) {
        for (uint32_t j = 0; j < 64; ++j) {
          ASSERT_LE(std::fabs(block.value(i, j)), most);
          ASSERT_NEAR(block.value(i, j), rows[i * 64 + j], block.scale(j) * 1.5);
        }
      }
    }
  }
}

TEST(QuantiseChannels, WhatWasQuantisedOnceStaysAsItIs) {
  Rng rng(45);
  const ChannelBlock once(random_block(rng, 96, 2.0), 96);
  std::vector<float> rows(once.q.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    rows[i] = static_cast<float>(once.value(i / 96, static_cast<uint32_t>(i % 96)));
  }
  const ChannelBlock twice(rows, 96);
  for (size_t i = 0; i < rows.size(); ++i) {
    const auto j = static_cast<uint32_t>(i % 96);
    ASSERT_NEAR(twice.value(i / 96, j), once.value(i / 96, j), once.scale(j) / 2);
    if (once.scale(j) == twice.scale(j)) {
      ASSERT_EQ(twice.q[i], once.q[i]);
    }
  }
}

}  // namespace
}  // namespace keyhole::cpu::test

// That steps of many query rows take the pass by Hopper's warpgroup products where it is to be had: without it they
// have the same answers, only later. And that its states are those of double precision, for every group and number of
// tokens that it takes.
#include "gpu/cuda/codes/warpgroup_kernels.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <string>
#include <utility>

#include "gpu/cuda/common/kernel_generation.h"
#include "tests/gpu/codes_layer.h"
#include "tests/gpu/cuda_fixture.h"

namespace keyhole::gpu::test {
namespace {

TEST(WarpgroupKernels, AreTakenWhereTheDeviceHasThem) {
  KEYHOLE_NEEDS_GPU();
  if (kernels_major(0) != 9) GTEST_SKIP() << "kernels of another device run here";
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  EXPECT_TRUE(codes::warpgroups_run_here());
  for (const uint32_t dim : {64U, 128U, 256U}) {
    for (const uint32_t bits : {2U, 4U}) {
      const uint32_t fewer = dim > 128 ? 8 : 16;
      for (const uint32_t rows : {fewer + 1, 17U, 20U, 24U, 32U, 40U, 48U}) {
        const codes::WideKernels kernels = codes::group_kernels_of({dim, bits, bits}, rows);
        EXPECT_NE(kernels.attend, nullptr) << dim << ", " << bits << " bits, " << rows << " rows";
        EXPECT_TRUE(kernels.fits(227 * 1024))
            << dim << ", " << bits << " bits, " << rows << " rows";
      }
      EXPECT_EQ(codes::group_kernels_of({dim, bits, bits}, fewer).attend, nullptr);
      EXPECT_EQ(codes::group_kernels_of({dim, bits, bits}, 49).attend, nullptr);
    }
  }
  EXPECT_EQ(codes::group_kernels_of({96, 4, 4}, 24).attend, nullptr);
  EXPECT_EQ(codes::group_kernels_of({128, 2, 4}, 24).attend, nullptr);
}

/// Whether clusters choose the step's rows: some need more shared memory than there is.
bool chosen_by_a_cluster(const Case& c) {
  CodesStep step = step_of(c, c.blocks + c.spare);
  step.cluster = true;
  EXPECT_EQ(prepare_codes(step, 0), cudaSuccess);
  return step.cluster;
}

/// One of the steps below, which take sanitizers minutes: 9 to 16 rows of 256 components have an instance of their own.
TEST(WarpgroupKernels, TwoTokensOf256ComponentsAreThoseOfDoublePrecision) {
  KEYHOLE_NEEDS_GPU();
  if (kernels_major(0) != 9) GTEST_SKIP() << "kernels of another device run here";
  for (const uint32_t bits : {2U, 4U}) {
    SCOPED_TRACE(std::to_string(bits) + " bits");
    Case c{256, bits, 12};
    c.tokens = 2;
    c.blocks = 3;
    c.cluster = chosen_by_a_cluster(c);
    Layer layer(c);
    ASSERT_TRUE(layer.step().wide);
    layer.run(16);
    layer.check(c.blocks);
  }
}

/// Steps of a dimension and a number of bits with all groups and numbers of tokens that have more query rows together
/// than the pass for few rows takes: of 256 components 9 to 48, of fewer 17 to 48.
class WarpgroupSteps : public testing::TestWithParam<std::pair<uint32_t, uint32_t>> {};

TEST_P(WarpgroupSteps, OfEveryGroupAndNumberOfTokensAreThoseOfDoublePrecision) {
  KEYHOLE_NEEDS_GPU();
  if (kernels_major(0) != 9) GTEST_SKIP() << "kernels of another device run here";
  const auto [dim, bits] = GetParam();
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 rng(seed);
  uint32_t taken = 0;
  for (uint32_t group = 1; group <= 16; ++group) {
    for (uint32_t tokens = 2; tokens <= 8; ++tokens) {
      const uint32_t rows = group * tokens;
      if (rows <= (dim > 128 ? 8U : 16U) || rows > kMostStepRows ||
          tokens > most_step_tokens(group))
        continue;
      Case c{dim, bits, rows};
      c.tokens = tokens;
      c.blocks = 1 + rng() % 6;
      c.spare = rng() % 3;
      c.rows = rng() % 2 == 0 ? DType::f16 : rng() % 2 == 0 ? DType::bf16 : DType::i8;
      // Logits of codes of 2 bits are off by five times as much.
      c.scale = bits == 4 && rng() % 2 == 0 ? 2.0F : 1.0F;
      c.softcap = rng() % 4 == 0 ? 5.0F : 0.0F;
      const uint32_t exact_rows = rng() % 2 == 0 ? 16 : 0;
      SCOPED_TRACE("group " + std::to_string(group) + ", tokens " + std::to_string(tokens) +
                   ", scale " + std::to_string(c.scale) + ", cap " + std::to_string(c.softcap));
      ASSERT_NE(codes::group_kernels_of({dim, bits, bits}, rows).attend, nullptr);
      c.cluster = chosen_by_a_cluster(c);
      Layer layer(c);
      ASSERT_TRUE(layer.step().wide);
      layer.run(exact_rows);
      layer.check(c.blocks);
      ++taken;
      if (HasFailure()) return;
    }
  }
  EXPECT_GT(taken, 30U);
}

INSTANTIATE_TEST_SUITE_P(Shapes, WarpgroupSteps,
                         testing::Values(std::pair{64U, 2U}, std::pair{64U, 4U},
                                         std::pair{128U, 2U}, std::pair{128U, 4U},
                                         std::pair{256U, 2U}, std::pair{256U, 4U}),
                         [](const auto& test) {
                           return "dim" + std::to_string(test.param.first) + "bits" +
                                  std::to_string(test.param.second);
                         });

}  // namespace
}  // namespace keyhole::gpu::test

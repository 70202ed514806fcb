// That steps of many query rows take the pass by Hopper's warpgroup products where it is to be had: without it they have the same
// answers, only later.
#include "gpu/cuda/codes/warpgroup_kernels.h"

#include <gtest/gtest.h>

#include <cstdint>

#include "gpu/cuda/common/kernel_generation.h"
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
      for (const uint32_t rows : {9U, 16U, 17U, 20U, 24U, 32U, 40U, 48U}) {
        const codes::WideKernels kernels = codes::group_kernels_of({dim, bits, bits}, rows);
        EXPECT_NE(kernels.attend, nullptr) << dim << ", " << bits << " bits, " << rows << " rows";
        EXPECT_TRUE(kernels.fits(227 * 1024))
            << dim << ", " << bits << " bits, " << rows << " rows";
      }
      EXPECT_EQ(codes::group_kernels_of({dim, bits, bits}, 8).attend, nullptr);
      EXPECT_EQ(codes::group_kernels_of({dim, bits, bits}, 49).attend, nullptr);
    }
  }
  EXPECT_EQ(codes::group_kernels_of({96, 4, 4}, 24).attend, nullptr);
  EXPECT_EQ(codes::group_kernels_of({128, 2, 4}, 24).attend, nullptr);
}

}  // namespace
}  // namespace keyhole::gpu::test
